"""The first state, made sharded: for a step (`train_state`), or as trees for your own loop (`trees`).

trainable        which parameters are trained
sharding_report  reports once what stays replicated
"""
