"""The optimizer's update: of padded leaves (`padded`), of offloaded state (`offloaded`), and additions to optax.

Additions: weight averages (`ema`), learning rates (`schedules`) and checks (`optimizer_checks`).
"""
