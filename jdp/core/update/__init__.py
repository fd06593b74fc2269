"""The end of a step (`guarded`), with the optimizer's state in host memory (`offloaded`), and additions to optax.

Additions: weight averages (`ema`), learning rates (`schedules`) and checks (`optimizer_checks`).
"""
