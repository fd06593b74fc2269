"""The end of a step (`guarded`), and additions to optax.

Additions: Muon under ZeRO (`muon`), weight averages (`ema`), learning rates (`schedules`), checks (`optimizer_checks`).
"""
