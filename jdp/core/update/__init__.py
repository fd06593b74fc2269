"""The optimizer's update: of padded leaves (`padded`), of offloaded state (`offloaded`), and additions to optax.

Additions: weight averages (`ema`), learning rates (`schedules`), checks (`optimizer_checks`), the noise scale of
gradients (`noise_scale`), and steps that a replica takes by itself (`local_steps`).
"""
