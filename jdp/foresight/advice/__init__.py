"""What to change: `advice` for one forecast, `tune` among settings, `scaling` over numbers of devices."""
