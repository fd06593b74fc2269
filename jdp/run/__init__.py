"""One run of an experiment: the loop, its folder, metrics, resume.

Begin in `loop.py`.
"""
