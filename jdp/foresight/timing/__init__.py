"""Time of a step.

`timeline.py` simulates the schedule of `operations.py`; `kernels.py`, `matmuls.py` and `collectives.py` compute how
long one operation takes, from published rates or from those that `cpu_rates.py` measures; `model_flops.py` and `mfu.py`
compute what share of the devices' peak a step makes use of; `chrome_trace.py` writes a timeline for trace viewers.
"""
