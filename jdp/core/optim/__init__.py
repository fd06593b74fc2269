"""Beside optax: weight averages (`ema.py`), learning rates (`schedules.py`), and what cannot work (`checks.py`)."""
