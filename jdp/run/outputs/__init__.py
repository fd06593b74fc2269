"""What a run writes and shows: `metrics.py` and `trackers.py`, the `terminal.py`, and the `profiler.py`'s traces."""
