"""Time of a step.

`timeline.py` simulates the schedule of `tasks.py`; `kernels.py`, `matmuls.py` and `collectives.py` say how long one
operation takes; `model_flops.py` and `mfu.py` what part of the devices' peak that is.
"""
