"""Outputs of a run: `metrics.py` and `trackers.py`, the `terminal.py`, and the `profiler.py`'s traces."""
