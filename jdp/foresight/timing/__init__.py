"""Time of a step: operations timed by published rates, and the simulated schedule (`timeline.py`)."""
