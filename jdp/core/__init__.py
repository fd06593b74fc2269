"""What a training loop of your own uses: mesh, plan, state, step.

sharding/       the mesh, the table of strategies, and the plan: how every leaf of a state is sharded
init.py         makes the state, sharded from the start
step.py         a training step and an evaluation step, from top to bottom
gradients/      the one algorithm behind every strategy, with XLA's collectives (`auto`) or with its own (`manual`)
layers.py       `scan_layers`: where zero3 gathers weights layer by layer
flax_nnx/       the only code here that knows Flax NNX
optim/          weight averages, learning rates, checks of optimizers
distributed.py  joins a cluster of processes; `handshake.py` compares how they were started, `agreement.py` what they
                are about to compute, both over JAX's coordination service (`coordination.py`)
batch.py        checks a batch; `batch_keys.py` draws random numbers by global row
types.py        `Loss`, and the types in signatures; `state.py` and `precision.py` have the other two that travel
"""
