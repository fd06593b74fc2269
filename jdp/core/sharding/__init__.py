"""How one array is sharded: the mesh and its axes, the table of strategies, placements, rules, and host memory."""
