"""The end of a step (`guarded`), with the optimizer's state in host memory (`offloaded`), and additions to optax.

Additions: Muon under ZeRO (`muon`), weight averages (`ema`), learning rates (`schedules`), checks (`optimizer_checks`).
"""
