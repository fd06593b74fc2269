"""How one array is sharded: the mesh (`mesh`), the table of strategies (`strategy`), placements.

placement        chooses how one array is sharded; `leaf_table` lists them
optimizer_state  finds the parameter that a leaf of the optimizer state belongs to
rules            checks the form of rules; `axes` names mesh axes, and what a batch must divide by
traced_mesh      the mesh that a model is being traced for
links            how long collectives take along its axes
host_memory      memory of the host for offloaded state
"""
