"""The checks of `jdp doctor` for this machine, and for the processes together; each finding names the fix."""
