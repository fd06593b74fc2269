"""What a compiled step will hold, send and wait for.

Begin in `foresee.py` or `verify.py`. `targets/` describes devices that this machine need not have, and XLA compiles the
real step for them. `program/` parses the result; `memory.py`, `traffic/` and `timing/` read it. `any_step/` does so for
steps that jdp did not make. Both are one `Reading` (`traffic/origin.py`), and `step_report.py` is the report of both.
"""
