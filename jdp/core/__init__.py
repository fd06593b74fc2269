"""What a training loop of your own uses: mesh, plan, state, step.

types.py        `Loss`, and the types in signatures; `state.py` and `precision.py` have the other two that travel
batch.py        checks a batch
plan.py         how every leaf of a state is sharded
layers.py       `scan_layers`: where zero3 gathers weights layer by layer; `gather_rows.py` for contrastive losses
step.py         a training step and an evaluation step, from top to bottom
value_and_grad.py   the gradient alone, for your own loop
init/           makes the state, sharded from the start
sharding/       the mesh, the table of strategies, how one array is sharded
gradients/      the one algorithm behind every strategy, with XLA's collectives (`auto`) or with its own (`manual`)
update/         the end of a step: clip, update, finite guard; muon, weight averages, learning rates
reading/        reads and runs traced programs (jaxprs)
cluster/        joins a cluster of processes, whose programs are compared before the first step
compiling/      XLA's options; compiled programs on disk
flax_nnx/       the only code here that knows Flax NNX
"""
