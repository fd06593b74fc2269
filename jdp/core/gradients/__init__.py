"""Gradients of a loss over devices and microbatches: one algorithm (`accumulate`), two views (`views`).

A training step, from `train_step(state, batch)` to the new state: each file, its inputs and its results.

Letters: R rows of the global batch, D its shards (replica × data), K microbatches (`accumulate`). A parameter has the
global shape S and two specs (`Placement`): at rest, and at compute. Under zero1-3 rest is compute with `data` on one
more dimension; under ddp, and for leaves too small to shard, the two are equal. p, c, r: the dtypes `params`,
`compute`, `reduce` of `Precision`.

    train_step(state, batch)               params S at rest, p; model_state replicated; batch [R, ...]
    │
    ├─ partitioned_loss.py  view           how is the loss called? Settled once for each shape of batch
    │  └─ loss_view.py  settle_view        the loss is traced on the rows of a call, not run:
    │      ├─ views.py  chosen_view        what it returns decides: jdp.Loss manual, a scalar auto
    │      ├─ row_keys.py  read_draws      which of its draws count rows: their shapes at two numbers of rows
    │      ├─ loss_call.py  with_outputs   which arrays of its aux are rows
    │      └─ loss_check.py  Trial         is it a sum over rows? Tried on a few rows, before the first step
    │
    └─ core/step.py    _train              traced by jit; key = fold_in(state.rng, state.consumed)
       │
       ├─ views.py     auto                either: global arrays
       │     params                        S at rest, as they are
       │     batch                         rows = R: [R, ...], constrained to P((replica, data))
       │
       ├─ views.py     manual              or: each device's own arrays, in a shard_map over replica and data
       │     params                        its shard at rest (collectives.to_replica_view reshapes what enters)
       │     batch                         rows = R / D: [R / D, ...]
       ▼
       accumulate.py   step_gradients      from here on one code, with the `Collectives` of the view (collectives.py):
       │
       │     collective   auto: a constraint to       manual, by collectives.py, encoded by wire.py
       │     gather       the compute spec            all_gather over data; none where rest = compute
       │     reduce       the rest spec               psum_scatter over data; none where rest = compute
       │     finish       the rest spec               psum over replica; where rest = compute, over data too
       │     sum          none: sums are global       jax.lax.psum over replica and data
       │
       │  1. working_copy                  ddp            S at compute, cast to c
       │                                   zero1, zero2   shard, p → cast to c → gather → S at compute, c
       │                                   zero3          the shard at rest, p: gathered in 2
       │
       │  2. for each microbatch           K = 1: the batch. Else [rows, ...] → [K, rows / K, ...] and a lax.scan that
       │     │                             carries gradients, sums and the model state that changes (accumulate.py)
       │     ├─ loss_call.py  TracedLoss   the loss as a function of weights: shard → gather → S, c (boundary.py), at
       │     │   │                         the top or, in scan_layers, layer by layer (core/layer_loop.py)
       │     │   └─ loss_fn                (model, batch, rng) → Loss → Sums (float32), model state afterwards
       │     ├─ jax.value_and_grad         ddp, zero1     S at compute, c → cast to r
       │     │                             zero2          S at compute, c → cast to r → reduce → at rest, r
       │     │                             zero3          the same, in the backward pass of the gather
       │     └─ add                        to the accumulators of gradients and sums
       │
       │  3. reduce (ddp, zero1), finish   Σ∇total: S at rest, r, summed over the batch axes; of frozen parameters none
       │
       │  4. sum, average                  Sums of all R rows; under manual the mean of floating-point model state that
       │                                   changed (loss_call.py)
       ▼
       core/step.py    _train              gradients / Σweight in float32 → norm → clip → optimizer, at rest →
                                           the old state where a value is not finite (update/optimizer.py)
    new state, metrics                     params S at rest, p; metrics: global

Under manual, on several devices, a layer loop gathers one layer ahead and reduces one layer behind, in every strategy.
zero2 and zero3 reduce in each microbatch, ddp and zero1 in the last: there the boundary first adds the gradients of the
others. If a loss uses a layer's weights in several places, they are reduced at the top (`accumulate._sends_in_loops`).

An evaluation step (`accumulate.evaluate`) is 1, the forward pass of 2, and the sums of 4.
"""
