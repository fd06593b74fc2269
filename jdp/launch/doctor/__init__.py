"""The checks of `jdp doctor`: of this machine, and of the processes together; each finding names the fix."""
