"""Outputs of a run: `metrics.py`, `samples.py`, the `terminal.py`, and the `profiler.py`'s traces."""
