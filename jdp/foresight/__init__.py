"""What a compiled step will hold, send and wait for.

`targets/` describes devices that this machine need not have, so that XLA compiles the real step for them; `program/`
reads the result, and `memory/`, `traffic/` and `timing/` read from it what is asked.
`any_step/` does so for steps that jdp did not make. Begin in `foresee.py` or `verify.py`.
"""
