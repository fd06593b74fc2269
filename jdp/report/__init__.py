"""Self-contained pages and pictures for people who decide what to launch, and for those who look at what ran."""
