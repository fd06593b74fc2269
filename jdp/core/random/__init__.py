"""The same random numbers for a row of the global batch on any mesh.

row_keys      a key that knows which rows a call has; which draws of a loss count rows
trial_values  weights, rows and keys on which a loss is tried
user_keys     checks of a user's keys
"""
