"""Gradients of a loss over devices and microbatches: one algorithm (`accumulate`), two views (`auto`, `manual`).

A training step, from `train_step(state, batch)` to the new state: each file, and what enters and leaves it.

Letters: R rows of the global batch, D its shards (replica × data), K microbatches (`accumulate`). A parameter has the
global shape S and two specs (`Placement`): at rest, and at compute. Under zero1-3 rest is compute with `data` on one
more dimension; under ddp, and for leaves too small to shard, the two are equal. p, c, r: the dtypes `params`,
`compute`, `reduce` of `Precision`.

    train_step(state, batch)               params S at rest, p; model_state replicated; batch [R, ...]
    │
    ├─ partitioned_loss.py  choose         "auto" or "manual"?
    │  ├─ partitioning.py  choose          for each shape of batch; the loss is traced as the step calls it, not run
    │  │   ├─ loss_program.py              its jaxpr, made once for each shape of a call; the step runs it
    │  │   ├─ loss_trace.py                read: what only a global view can run, which weights are used twice
    │  │   ├─ auto_contract.py             where auto would send more, or in another dtype, than the strategy promises
    │  │   ├─ global_trace.py              the loss on global arrays, where its program in the step proves nothing
    │  │   ├─ loss_check.py  constant_term terms that would be counted once a call, such as a weight penalty
    │  │   └─ proof.py  prove          a sum over rows? reader.py follows the rows through the jaxpr by rules for
    │  │       │                           each primitive: rules.py, shapes.py, products.py, gathers.py
    │  │       └─ quotients.py             a scalar that ends in a quotient of sums is read as total and weight
    │  └─ partitioning.py  check           a loss that is not proven, on values: keeps the choice, takes auto, or raises
    │      └─ loss_check.py  mixing        Σtotal / Σweight of a few rows in one call, and in several
    │
    └─ core/step.py    _train              traced by jit; key = fold_in(state.rng, state.consumed)
       │
       ├─ auto.py      gradients           either: global arrays
       │     params                        S at rest, as they are
       │     batch                         rows = R: [R, ...], constrained to P((replica, data))
       │
       ├─ manual.py    gradients           or: each device's own arrays, in a shard_map over replica and data
       │     params                        its shard at rest (model_axes.to_replica_view reshapes what enters)
       │     batch                         rows = R / D: [R / D, ...]
       ▼
       accumulate.py   step_gradients      from here on one code, with the `Collectives` of the view (spec.py):
       │
       │     collective   auto.py: a constraint to    manual.py, by collectives.py, encoded by wire.py
       │     gather       the compute spec            all_gather over data; none where rest = compute
       │     reduce       the rest spec               psum_scatter over data; none where rest = compute
       │     finish       the rest spec               psum over replica; where rest = compute, over data too
       │     sum          none: sums are global       jax.lax.psum over replica and data
       │
       │  1. working_copy                  if K > 1, and the strategy gathers once a step:
       │                                   ddp            S at compute, cast to c
       │                                   zero1, zero2   shard, p → cast to c → gather → S at compute, c
       │                                   else the parameters at rest, p, which are gathered in 2
       │
       │  2. for each microbatch           K = 1: the batch. Else [rows, ...] → [K, rows / K, ...] and a lax.scan that
       │     │                             carries gradients, sums and the model state that changes
       │     ├─ microbatch.py Microbatch   the loss behind a `Boundary` (boundary.py): what is gathered at use, and
       │     │                             which gradients the backward pass sums over devices
       │     ├─ rowwise_loss.py            runs the program; takes a key, or a `BatchKey` for some of the R rows:
       │     │   ├─ random/match_draws.py  then each draw is compared with the one for all R rows,
       │     │   └─ random/replay.py       and the loss is run again so that it draws its rows of that one
       │     ├─ loss_call.py  TracedLoss   shard → gather → S, c, at the top or, in scan_layers, layer by layer
       │     │   │                         (core/layers.py, core/layer_loop.py)
       │     │   └─ loss_fn                (model, batch, rng) → Loss → Sums (float32), model state afterwards
       │     ├─ backward pass              gradient, c → cast to r → reduce → at rest, r, by the boundary;
       │     │                             ddp, zero1 with K > 1: not yet reduced, S at compute, r
       │     └─ add                        to the accumulators of gradients and sums
       │
       │  3. reduce (ddp, zero1), finish   what the backward pass left: Σ∇total: S at rest, r, summed over the batch
       │                                   axes; of frozen parameters none
       │
       │  4. sum, average                  Sums of all R rows; under manual the mean of floating-point model state that
       │                                   changed (model_state.py)
       ▼
       manual.py                           model_axes.from_replica_view: gradients in the shapes S again
       │
       └─ core/step.py  _train             gradients / Σweight in float32 → norm → clip → optimizer, at rest →
                                           the old state where a value is not finite (update/guarded.py)
    new state, metrics                     params S at rest, p; metrics: global

Under manual, on several devices, a layer loop gathers one layer ahead and reduces one behind, in every strategy: zero2
and zero3 in each microbatch, ddp and zero1 in the last, where the boundary adds the gradients of the others before it
reduces. A loss that uses a layer's weights in several places is reduced at the top (`accumulate._sends_in_loops`).

A loss of `jdp.value_and_grad(has_aux=True)` returns arrays beside its `Sums`; `outputs.py` tells those with rows, which
come back in the order of the batch, from those without.

`tracing/collectives.py` reads which collectives the trace of a lowered step issues, for `jdp.verify`.
An evaluation step (`accumulate.evaluate`) is 1, the forward pass of 2, and the sums of 4.
"""
