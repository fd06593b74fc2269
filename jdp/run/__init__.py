"""One run of an experiment: the loop, its folder, its outputs, how it resumes; sweeps of runs. Begin in `loop.py`."""
