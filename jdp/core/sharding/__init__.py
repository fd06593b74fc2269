"""How state and batch are sharded: the mesh (`mesh.py`), the table of strategies (`strategy.py`), the plan (`plan.py`).

`placement.py` chooses how one array is sharded; `optimizer_state.py` finds the parameter that a leaf of the optimizer
state belongs to; `flat.py` is how a leaf rests that no dimension divides of; `home.py` goes between the user's own mesh
and jdp's; `rules.py` checks the form of rules; `reports.py` says once what is padded, and what stays whole.
"""
