"""The same random numbers for a row of the global batch on any mesh.

row_keys     a key that knows which rows a call has
match_draws  compares two traces: which draws have rows
replay       runs a traced program so that each draw is that of its rows; `threefry` computes a part of a draw
user_keys    checks and copies of a user's keys
"""
