"""Time of a step.

`timeline.py` simulates the schedule of `operations.py`. `kernels.py` and `matmuls.py` compute the time of one
operation from published rates. `model_flops.py` computes the share of the devices' peak that a step uses.
"""
