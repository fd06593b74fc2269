"""Predictions from a compiled step: its memory, traffic and schedule.

Begin in `foresee.py` or `verify.py`. `targets/` describes devices that this machine need not have, and XLA compiles the
real step for them. `program/` parses the result; `memory.py`, `traffic/` and `timing/` read it. `any_step/` handles
steps that jdp did not make. Both become a `Reading` (`traffic/origin.py`); `memory.py` reports on it.
"""
