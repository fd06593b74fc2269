"""One run of an experiment: the loop, its folder, metrics, resume, sweeps.

Begin in `loop.py`.
"""
