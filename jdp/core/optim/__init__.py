"""Additions to optax: weight averages (`ema.py`), learning rates (`schedules.py`), checks (`checks.py`)."""
