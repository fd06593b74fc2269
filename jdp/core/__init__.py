"""What a training loop of your own uses: mesh, plan, state, step.

sharding/    the mesh, the strategies' table, and where every leaf of a state lives
init.py      the state, born where the plan places it
step.py      a training step, and an evaluation step, from top to bottom
gradients/   the one algorithm behind every strategy, in XLA's vocabulary (`auto`) and in jdp's own (`manual`)
layers.py    `scan_layers`: where zero3 gathers weights layer by layer
flax_nnx/    everything that is known of Flax NNX
optim/       weight averages, learning rates, and what optimizers may not do
"""
