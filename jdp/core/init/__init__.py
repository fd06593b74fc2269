"""The first state, made sharded: for a step (`train_state`), or as trees for your own loop (`trees`).

sharding_report  reports once the parameters that stay replicated
"""
