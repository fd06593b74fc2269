"""Where things live: `mesh.py`, the table of strategies in `strategy.py`, and from both the `plan.py`.

`placement.py` chooses how one array is sharded; `optimizer_state.py` finds the parameter that a leaf of the optimizer
state belongs to.
"""
