"""One run of an experiment: `loop.py` from top to bottom, its folder, its outputs, how it resumes; sweeps of runs."""
