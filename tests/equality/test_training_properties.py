"""Whatever is trained, and however it is sharded: the steps of one device and a hand-written loop.

Each draw is a small model with its loss, optimizer and batches (`drawn_models.Case`), trained for three steps under
three settings (`drawn_cases.Setting`) by jdp, and once by `one_device`, which imports nothing of jdp. All together they
go through every strategy and partitioning. Compared are every metric of every step, the parameters, what
the model keeps, the optimizer's state, and an evaluation; a third of the runs is saved and restored onto another plan.

What can have no right answer on parts of a batch (`may_be_refused`) is right or refused, in the words of `REFUSALS`.
A draw that fails prints its case and its setting, one line each, and belongs into `KEPT` when its cause is fixed.
`pytest -m slow` draws many more: JDP_DRAWS says how many, JDP_FIRST_DRAW from where.

Bounds. float32 sums over devices and microbatches run in another order, some 1e-7 of the largest term. Over 250 runs
the largest difference is 6e-7 of a loss and 8e-7 of a leaf (of its largest value, or of 0.1). The bound leaves a factor
of six; a mask or a weight of one row in 64 that is off shows at 1e-3. A few draws magnify a rounding: a batch norm of a
constant column divides it by sqrt(1e-5). These are compared with the differences of the hand-written step itself
(`spread`), whose rows XLA splits as the setting does, and whose parameters start one rounding apart.
"""

import functools
import os
import re

import drawn_models
import jax
import numpy as np
import one_device
import pytest
from drawn_cases import OPTIONS, PLACES, Setting, axes, batch_shards, draw, may_be_refused
from drawn_models import OPTIMIZERS, Case
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdp

BOUND = 5e-6
FIRST_DRAW = int(os.environ.get("JDP_FIRST_DRAW", "1000"))
REFUSALS = "must be a sum over rows, and draw by row|on . microbatches|would depend on each device's rows"
QUICK = ((160, 0), (215, 0), (115, 2), (1526, 2))  # draws and settings: with KEPT they take every option
KEPT = (
    # What a layer changes inside scan_layers, and what it reaches in its parent.
    (
        Case(model="nnx", layers=2, inner="norm", state="seen", rows=16, remat="full", walk="twice"),
        Setting("zero3", "manual", 2),
    ),
    (
        Case(model="nnx", layers=3, inner="one_rngs", state="half_table", walk="twice", remat="dots"),
        Setting("ddp", "manual"),
    ),
    (Case(model="nnx", layers=3, inner="dropout", state="norm", stacked=True), Setting("zero3", "manual", 1, "data=4")),
    (Case(model="nnx", layers=3, noise="parents", stacked=True), Setting("zero3", "auto", 2)),
    (Case(model="nnx", layers=2, inner="calls", state="layer_calls", walk="tree"), Setting("zero2", "manual", 2)),
    # Tables that no call changes, masked norms, counts of the batch.
    (Case(model="nnx", state="half_table"), Setting("zero1", "manual", 2, "data=4")),
    (Case(model="nnx", state="masked_norm", weights="uneven", rows=16), Setting("zero3", "manual", 2)),
    (Case(model="nnx", state="counted"), Setting("zero1", None, 2, "data=4")),
    (Case(model="nnx", state="norm", rows=16), Setting("zero1", None, 2, "replica=2 data=2")),
    (Case(model="nnx", state="norm", bad="infinite"), Setting("zero3", "auto")),
    # Partial training.
    (Case(frozen="integers", clip_norm=0.3), Setting("zero1", "manual", 2)),
    (Case(frozen="half", layers=3, stacked=True, remat="full"), Setting("zero3", "auto")),
    (Case(model="nnx", frozen="same", layers=2, stacked=True, clip_norm=0.3), Setting("zero3", "manual", 2)),
    # Infinite gradients of leaves that no dimension divides.
    (Case(rows=20, weights="uneven", bad="empty"), Setting("zero1", "manual", 1, "data=5")),
    # Terms that are no sums over examples.
    (Case(term="bare_decay"), Setting("ddp", "auto", 1)),
    (Case(term="pairs", tied=True, walk="tree"), Setting("zero2", None, 1)),
    (Case(term="negatives", tied=True, seed=1), Setting("zero2", None, 1)),  # of four rows, few apart from one another
    # Noise: two rows a device, one row a device, as many layers as rows.
    (Case(noise="mask", metrics="own", rows=16, optimizer="momentum"), Setting("zero2", "manual", 2)),
    (Case(noise="layer_split", layers=4, rows=16, optimizer="clipped"), Setting("zero3", "manual", 1, "data=4")),
    (
        Case(noise="layer_fold", layers=2, inputs="tokens", stacked=True, optimizer="adamw"),
        Setting("zero3", "manual", 2, "replica=2 data=2"),
    ),
    (
        Case(noise="inside", layers=2, stacked=True, remat="dots", optimizer="frozen_moment"),
        Setting("zero3", "manual", 2, "data=4"),
    ),
    (Case(noise="dropout"), Setting("zero1", "manual", 2, "replica=2 data=2")),
    (Case(model="nnx", noise="held", walk="own", optimizer="masked"), Setting("zero3", "manual", 2)),
)


@functools.cache
def optimizer(name):
    return OPTIMIZERS[name]()


def made_alike(case):
    """The simplest case with the same initial parameters: they are made once for all of those."""
    if case.model == "nnx":
        return case
    names = ("seed", "inputs", "width", "layers", "stacked", "tied", "shared", "frozen")
    return Case(**{name: getattr(case, name) for name in names})


@functools.cache
def alone(case):
    return one_device.initial(functools.partial(drawn_models.init, case), case.seed)


@functools.cache
def expected(case, microbatches, evaluates=True, mesh="", nudge=0):
    """The run of one device; or of a mesh over which XLA splits the rows, with parameters that start a rounding off."""
    kind, params, state = alone(made_alike(case))
    devices = np.asarray(jax.devices()[: batch_shards(mesh)])
    return one_device.train(
        (kind, one_device.nudged(params, nudge), state),
        functools.partial(drawn_models.loss, case, one_device.loop),
        optimizer(case.optimizer),
        drawn_models.batches(case),
        seed=case.seed,
        clip_norm=case.clip_norm,
        is_trained=lambda path: not (case.frozen and path.startswith("e")),
        microbatches=microbatches,
        evaluates=evaluates,
        split=NamedSharding(Mesh(devices, "rows"), PartitionSpec("rows")) if mesh else None,
    )


def spread(case, setting, microbatches, evaluates):
    """What rounding alone changes in the hand-written run: name -> the largest distance between ways to compute it."""
    want = expected(case, microbatches, evaluates)
    meshes = [setting.mesh, *([setting.then[1]] if setting.then else [])]
    ways = [expected(case, microbatches, evaluates, mesh, nudge) for mesh in meshes for nudge in range(4)]
    distances = [{name: apart for name, apart, *_ in one_device.compared(way, want)} for way in ways]
    return {name: max(way[name] for way in distances) for name in distances[0]}


def loss_of(case):
    loop = functools.partial(jdp.scan_layers, remat=case.remat)

    def loss_fn(model, batch, rng):
        value = drawn_models.loss(case, loop, model, batch, rng)
        return jdp.Loss(*value) if isinstance(value, tuple) else value

    return loss_fn


def plan_of(case, strategy, mesh):
    """A mesh with a model axis shards the first weight over it where that divides."""
    sizes = axes(mesh)
    devices = jax.devices()[: batch_shards(mesh) * sizes.get("model", 1)]
    rules = [("enter*", PartitionSpec(None, "model"))] if "model" in sizes and case.width % 2 == 0 else []
    return jdp.Plan(jdp.make_mesh(devices=devices, **sizes), strategy, rules=rules, min_shard_size=8)


def trained(case, setting, folder, *, evaluates, given=False):
    """Train the case by jdp, and evaluate. `folder`: where a checkpoint may go.

    `given`: with the reference's parameters, in place of those that jdp makes."""
    values = jax.device_get(alone(made_alike(case))[1]) if given else None
    start = (lambda _: values) if given else functools.partial(drawn_models.init, case)
    wrt = "[!e]*" if case.frozen else None
    loss_fn, key = loss_of(case), jax.random.key(case.seed)
    settings = {"accumulate": setting.accumulate, "partitioning": setting.partitioning}

    def made(plan):
        step = jdp.make_train_step(loss_fn, plan, clip_norm=case.clip_norm, **settings)
        return plan, step, (start, optimizer(case.optimizer), plan)

    plan, step, arguments = made(plan_of(case, setting.strategy, setting.mesh))
    state = jdp.init_state(*arguments, rng=key, wrt=wrt)
    rows = []
    for number, batch in enumerate(drawn_models.batches(case)):
        if number == 2 and setting.then is not None:
            jdp.save(folder / "saved", state)
            plan, step, arguments = made(plan_of(case, *setting.then))
            state = jdp.restore(folder / "saved", jdp.abstract_state(*arguments, rng=key, wrt=wrt))
        placed = batch if case.seed % 2 else jax.device_put(batch, plan.batch_sharding)  # either is taken
        state, metrics = step(state, placed)
        rows.append({name: float(value) for name, value in metrics.items()})
    evaluated = {}
    if evaluates:
        evaluate = jdp.make_eval_step(loss_fn, plan, **settings)
        evaluated = evaluate(state, placed if setting.then is None else batch)
    trees = (one_device.by_path(tree) for tree in (state.params, state.model_state, state.opt_state))
    return one_device.Run(rows, *map(jax.device_get, trees), {name: float(value) for name, value in evaluated.items()})


def check(case, setting, folder, evaluates=True, *, magnifies=False, **options):
    """`magnifies`: a difference over the bound is compared with twice the draw's own spread."""
    microbatches = setting.accumulate if case.keeps else 1
    want = expected(case, microbatches, evaluates)
    try:
        got = trained(case, setting, folder, evaluates=evaluates, **options)
    except ValueError as error:
        if may_be_refused(case, setting) and re.search(REFUSALS, str(error)):
            return
        raise
    apart = [entry for entry in one_device.compared(got, want) if not entry[1] <= BOUND]
    if apart and magnifies:
        own = spread(case, setting, microbatches, evaluates)
        apart = [entry for entry in apart if not entry[1] <= BOUND + 2 * own[entry[0]]]
    listed = "\n".join(f"  {name}: got {got}, expected {want}" for name, _, got, want in apart[:12])
    assert not apart, f"\n{case!r}\n{setting!r}\n{listed}"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("case", "setting"), [pytest.param(draw(n)[0], draw(n)[1][i], id=f"{n}-{i}") for n, i in QUICK]
)
def test_draws_equal_one_device(case, setting, tmp_path):
    check(case, setting, tmp_path)


@pytest.mark.parametrize(("case", "setting"), KEPT, ids=str)
@pytest.mark.default_ids(
    "Case(rows=16, model='nnx', state='norm')*",
    "Case(inputs='tokens', layers=2, stacked=True, noise='layer_fold', optimizer='adamw')*",
)
def test_kept_cases_equal_one_device(case, setting, tmp_path):
    """An evaluation has no noise, and no term went wrong in one: those cases are left without. Pytrees of equal
    parameters start from one reference's; modules, and the draws, are made by jdp."""
    evaluates = case.noise is None and case.term is None
    check(case, setting, tmp_path, evaluates=evaluates, given=case.model == "tree")


def test_the_runs_take_every_option():
    """Every strategy and partitioning, and every option of every field; `slow` draws many more."""
    draws = [(draw(number)[0], draw(number)[1][index]) for number, index in QUICK]
    runs = [*draws, *KEPT]
    taken = {(name, getattr(case, name)) for case, _ in runs for name in OPTIONS}
    assert taken >= {(name, option) for name, options in OPTIONS.items() for option in options}
    assert {(s.strategy, s.partitioning) for _, s in runs} >= {place[:2] for place in PLACES}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FIRST_DRAW, FIRST_DRAW + int(os.environ.get("JDP_DRAWS", "300"))))
def test_many_draws_equal_one_device(number, tmp_path):
    """All settings of a draw that fail are reported together."""
    failed = []
    case, settings = draw(number)
    for index, setting in enumerate(settings):
        try:
            check(case, setting, tmp_path / f"{index}", magnifies=True)
        except Exception as error:
            failed.append(f"{case!r}\n{setting!r}\n{type(error).__name__}: {error}")
    alone.cache_clear()
    expected.cache_clear()
    jax.clear_caches()
    assert not failed, "\n\n".join(failed)
