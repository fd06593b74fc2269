"""Features of a training step, each as a change of one small setup, and training with any two of them.

`FEATURES` is the table. `by_jdp` trains a setup as a user would; `by_hand` on one device by `one_device`, where local
steps are taken replica after replica. `check` compares the two. What loses digits (`LOSSY`) is held to the error of
its encoding, relative to how far the parameters moved, and to exact weights and first losses.
"""

import functools
import itertools
import re
from dataclasses import dataclass, field, replace

import drawn_models
import jax
import jax.numpy as jnp
import numpy as np
import one_device
import optax
from drawn_models import OPTIMIZERS, Case
from flax import nnx
from jax.sharding import PartitionSpec

import jdp
from jdp.core import noise_scale

ALL = ("ddp", "zero1", "zero2", "zero3")
ROWS, BOUND, DECAY = 32, 5e-6, 0.8
LOCAL = jdp.LocalSteps(2, lr=0.7, momentum=0.5)


@dataclass(frozen=True)
class Feature:
    """What a feature changes, in which strategies it does something, and of which other one it is another setting."""

    case: dict = field(default_factory=dict)
    mesh: dict = field(default_factory=dict)
    plan: dict = field(default_factory=dict)
    step: dict = field(default_factory=dict)
    strategies: tuple = ALL
    kind: str | None = None


def wire(gradients=None, strategies=ALL, **options):
    settings = {"wire": jdp.Wire(gradients, block=8, **options)}
    return Feature({"optimizer": "momentum"}, step=settings, strategies=strategies, kind="wire")


LAYERS = {"layers": 2, "stacked": True}
FEATURES = {
    "bf16": wire("bf16"),
    "int8": wire("int8"),
    "fp8": wire("fp8"),
    "topk": wire("topk", ALL[:3], fraction=0.5),
    "powersgd": wire("powersgd", ALL[:3], rank=1),
    "int8_weights": wire(None, ALL[1:], weights="int8"),
    "buckets": Feature(step={"buckets": 300}),
    "local_steps": Feature(mesh={"replica": 2}, step={"local_steps": LOCAL}, kind="replica"),
    "replica": Feature(mesh={"replica": 2}, kind="replica"),
    "offload": Feature(plan={"offload": "optimizer"}),
    "pad": Feature({"width": 7}, mesh={"data": 4}),
    "ema": Feature(),
    "lora": Feature({"model": "nnx"}, kind="wrt"),
    "wrt": Feature({"frozen": "same"}, kind="wrt"),
    "accumulate": Feature(step={"accumulate": 2}),
    "noise_scale": Feature({"weights": "ones"}, step={"noise_scale": True}, strategies=ALL[:3]),
    "products": Feature({"optimizer": "momentum"}, step={"precision": "fp8"}),
    "overlap": Feature(LAYERS, step={"overlap": True}, strategies=ALL[2:]),
    "scan_layers": Feature(LAYERS),
    "batch_norm": Feature({"model": "nnx", "state": "norm"}),
    "dropout": Feature({"noise": "mask"}),
    "group": Feature({"term": "grouped_pairs"}, step={"group": 2}),
    "own_loop": Feature(),
    "resume": Feature(),
    "model_axis": Feature(mesh={"model": 2}),
    "gather_rows": Feature(),
    "clip_norm": Feature({"clip_norm": 0.3}, step={"clip_norm": 0.3}),
    "eval": Feature(),
}
LOSSY = {"bf16": 0.02, "int8": 0.05, "fp8": 0.15, "topk": 1.0, "powersgd": 1.0, "int8_weights": 0.1, "products": 0.2}
INEXACT = {"products", "int8_weights"}  # in the forward pass, too
NOT_BOTH = (
    {"own_loop", "local_steps"},  # settings of a step, which own loops do not have
    {"own_loop", "noise_scale"},
    {"own_loop", "clip_norm"},
    {"own_loop", "eval"},
)
REFUSED: dict[frozenset, str] = {}
"""Pairs that are refused, in these words."""


def pairs():
    """Every two features that are not one setting, or settings of different calls."""
    for one, two in itertools.combinations(FEATURES, 2):
        same = FEATURES[one].kind is not None and FEATURES[one].kind == FEATURES[two].kind
        if not same and {one, two} not in NOT_BOTH:
            yield one, two


@dataclass(frozen=True)
class Setup:
    """A training run with features."""

    names: frozenset
    case: Case
    strategy: str
    axes: dict
    plan: dict
    settings: dict

    def has(self, name):
        return name in self.names

    @property
    def shards(self):
        return self.axes["data"] * self.axes.get("replica", 1)

    @property
    def wrt(self):
        return nnx.LoRAParam if self.has("lora") else "[!e]*" if self.has("wrt") else None

    def is_trained(self, path):
        return ("lora_" in path) if self.has("lora") else not (self.has("wrt") and path.startswith("e"))

    @property
    def start_case(self):
        """The case without what does not change initial parameters."""
        return replace(self.case, clip_norm=None, weights="ones", noise=None, term=None, optimizer="sgd")

    def by_hand_loss(self):
        return functools.partial(loss, self, one_device.loop, lambda x: (x, jnp.arange(len(x))))

    def tx(self):
        tx = OPTIMIZERS[self.case.optimizer]()
        return jdp.with_ema(tx, DECAY) if self.has("ema") else tx

    def made_plan(self):
        rules = {"rules": [("*enter*kernel" if self.case.model == "nnx" else "enter", PartitionSpec(None, "model"))]}
        rules = rules if "model" in self.axes and self.case.width % 2 == 0 else {}
        count = int(np.prod(list(self.axes.values())))
        mesh = jdp.make_mesh(devices=jax.devices()[:count], **self.axes)
        return jdp.Plan(mesh, self.strategy, min_shard_size=8, **rules, **self.plan)

    def elsewhere(self):
        """The same run under another strategy, on another number of devices."""
        allowed = strategies(self.names)
        strategy = allowed[(allowed.index(self.strategy) + 1) % len(allowed)]
        return replace(self, strategy=strategy, axes={**self.axes, "data": 6 - self.axes["data"]})


def strategies(names):
    return [s for s in ALL if all(s in FEATURES[name].strategies for name in names)]


def setup(*names):
    """The setup with these features: strategies, and who chooses the partitioning, go around the table."""
    fields, axes, plan, settings = {}, {}, {}, {}
    for feature in (FEATURES[name] for name in names):
        fields |= feature.case
        axes |= feature.mesh
        plan |= feature.plan
        settings |= feature.step
    allowed, number = strategies(names), sum((i + 1) * list(FEATURES).index(name) for i, name in enumerate(names))
    weights = {"weights": "uneven", "metrics": "own", "optimizer": "adamw", "width": 8}
    model = {"state": None} if fields.get("model") != "nnx" else {}
    axes = {"replica": axes.get("replica"), "data": 2 if "replica" in axes or "model" in axes else 4, **axes}
    axes = {name: size for name, size in axes.items() if size}
    if number % 2:
        settings["partitioning"] = "manual"
    case = Case(rows=ROWS, **{**weights, **model, **fields})
    return Setup(frozenset(names), case, allowed[number % len(allowed)], axes, plan, settings)


# The model and its loss.


class Adapted(drawn_models.Net):
    def __init__(self, case, rngs):
        super().__init__(case, rngs)
        self.enter = nnx.LoRA(drawn_models.FEATURES, 4, case.width, base_module=self.enter, rngs=rngs)


def init(made, key):
    return Adapted(made.case, nnx.Rngs(key)) if made.has("lora") else drawn_models.init(made.case, key)


def loss(made, loop, gather, model, batch, key):
    """The drawn models' (total, weight, metrics), with negatives of the whole batch where rows are gathered."""
    if made.has("products"):
        batch = {**batch, "x": batch["x"].astype(jnp.bfloat16)} if gather is jdp.gather_rows else batch
    total, weight, metrics = drawn_models.loss(made.case, loop, model, batch, key)
    if made.has("gather_rows"):
        x = batch["x"] @ (model.enter(jnp.eye(6)) if made.case.model == "nnx" else model["enter"])
        others, own = gather(x)
        total += optax.softmax_cross_entropy_with_integer_labels(x @ others.T, own).sum()
    return total, weight, metrics


def batches(made):
    return list(drawn_models.batches(made.case))


# By hand.


@functools.cache
def initial(names, case):
    return one_device.initial(functools.partial(init, Setup(names, case, "ddp", {}, {}, {})), case.seed)


def by_hand(made):
    """Train on one device: (the run, what it began with)."""
    start = initial(made.names & {"lora"}, made.start_case)
    settings = {"clip_norm": made.case.clip_norm, "is_trained": made.is_trained, "group": made.case.group}
    if made.case.keeps:
        settings["microbatches"] = made.settings.get("accumulate", 1)
    loop = one_device.Loop(start, made.by_hand_loss(), made.tx(), **settings)
    train = rounds if made.has("local_steps") else steps
    rows, params, opt_state, state = train(made, loop)
    averages = average(made, opt_state)
    evaluated = {}
    if made.has("eval"):
        seen = loop.together(params, averages) if made.has("ema") else params
        evaluated = one_device.evaluation(loop, seen, state, batches(made)[-1])
    trees = map(jax.device_get, (one_device.by_path(params), {**state, **numbered(averages)}))
    return one_device.Run(rows, *trees, jax.device_get(one_device.by_path(opt_state)), evaluated), start[1]


def key_of(made, number):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(made.case.seed), 1), number)


def floats(row):
    return {name: float(value) for name, value in row.items()}


def steps(made, loop):
    params, opt_state, state, rows = loop.params, loop.start(), loop.state, []
    for number, batch in enumerate(batches(made)):
        (params, opt_state, state), row, _ = loop.step(params, opt_state, state, batch, key_of(made, number))
        rows.append(floats(row))
    return rows, params, opt_state, state


def rounds(made, loop):
    """Local steps: each replica's, one after another, and the outer step; optimizer states are stacked."""
    params, states, state, rows = loop.params, [loop.start()] * 2, loop.state, []
    held = jax.tree.map(jnp.zeros_like, loop.part(params))
    for number, batch in enumerate(batches(made)):
        ends, norms, found = [], [], None
        for replica in range(2):
            key, own, kept = jax.random.fold_in(key_of(made, number), replica), params, state
            for h in range(LOCAL.steps):
                place = np.arange(ROWS).reshape(2, -1, LOCAL.steps, loop.group)[replica, :, h].ravel()
                part = jax.tree.map(lambda x, place=place: x[place], batch)
                after, row, sums = loop.step(own, states[replica], kept, part, jax.random.fold_in(key, h))
                own, states[replica], kept = after
                norms.append(row["grad_norm"])
                found = sums if found is None else jax.tree.map(jnp.add, found, sums)
            ends.append((loop.part(own), kept))
        mean, state = jax.tree.map(lambda a, b: (a + b) / 2, *ends)
        delta = jax.tree.map(jnp.subtract, loop.part(params), mean)
        held = jax.tree.map(lambda m, d: LOCAL.momentum * m + d, held, delta)
        agreed = jax.tree.map(lambda p, d, m: p - LOCAL.lr * (d + LOCAL.momentum * m), loop.part(params), delta, held)
        params = loop.together(params, agreed)
        rows.append({**floats(one_device.means(found)), "grad_norm": float(np.mean(norms)), "skipped": 0.0})
    return rows, params, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), state


def average(made, opt_state):
    """The average that `with_ema` keeps, of local steps the replicas' mean; None without it."""
    if not made.has("ema"):
        return None
    return jax.tree.map(lambda x: x.mean(0), opt_state.average) if made.has("local_steps") else opt_state.average


def numbered(averages):
    return {f"average {i}": leaf for i, leaf in enumerate(jax.tree.leaves(averages))}


# By jdp.


def by_jdp(made, folder):
    loss_fn = lambda *given: jdp.Loss(*loss(made, jdp.scan_layers, jdp.gather_rows, *given))  # noqa: E731
    start, key = functools.partial(init, made), jax.random.key(made.case.seed)
    if made.has("own_loop"):
        return own_loop(made, loss_fn, start, key, folder)
    plan, tx = made.made_plan(), made.tx()
    step = jdp.make_train_step(loss_fn, plan, **made.settings)
    state, rows = jdp.init_state(start, tx, plan, rng=key, wrt=made.wrt), []
    for number, batch in enumerate(batches(made)):
        if number == 2 and made.has("resume"):
            jdp.save(folder / "saved", state)
            plan = made.elsewhere().made_plan()
            step = jdp.make_train_step(loss_fn, plan, **made.settings)
            target = step.complete(jdp.abstract_state(start, tx, plan, rng=key, wrt=made.wrt))
            state = jdp.restore(folder / "saved", target)
        state, metrics = step(state, batch)
        rows.append(floats(metrics))
    averages = jdp.ema_params(state) if made.has("ema") else None
    evaluated = {}
    if made.has("eval"):
        settings = {k: v for k, v in made.settings.items() if k in ("accumulate", "precision", "partitioning", "group")}
        evaluated = floats(jdp.make_eval_step(loss_fn, plan, **settings)(averages or state, batch))
    if averages is not None:
        leaves = one_device.by_path(averages.unpadded().params)
        averages = {path: leaf for path, leaf in leaves.items() if made.is_trained(path)}
    state = state.unpadded()
    paths = map(one_device.by_path, (state.params, state.model_state, state.opt_state))
    params, others, opt_state = map(jax.device_get, paths)
    run = one_device.Run(rows, params, {**others, **numbered(jax.device_get(averages))}, opt_state, evaluated)
    return run, f"{plan!r}, {step.partitioning}"


def own_loop(made, loss_fn, start, key, folder):
    """The same by `jdp.value_and_grad`, with an optimizer of one's own: without norms, and what a step skips."""
    settings = {name: value for name, value in made.settings.items() if name != "clip_norm"}
    module, tx = made.case.model == "nnx", made.tx()

    def begin(plan):
        model = jdp.init(start, plan, rng=jax.random.fold_in(key, 0))
        gradient = jdp.value_and_grad(loss_fn, plan, wrt=made.wrt, **settings)
        if module:
            make = lambda model: nnx.Optimizer(model, tx, wrt=made.wrt or nnx.Param)  # noqa: E731
            return gradient, model, jdp.init(make, plan, of=model)
        return gradient, model, jdp.init(tx.init, plan, of=part(model))

    def part(tree):
        return {name: leaf if made.is_trained(name) else None for name, leaf in tree.items()}

    @jax.jit
    def update(grads, opt_state, model):
        updates, opt_state = tx.update(grads, opt_state, part(model))
        return {
            **model,
            **{k: v for k, v in optax.apply_updates(part(model), updates).items() if v is not None},
        }, opt_state

    (gradient, model, optimizer), rows = begin(made.made_plan()), []
    for number, batch in enumerate(batches(made)):
        if number == 2 and made.has("resume"):
            jdp.save(folder / "saved", (model, optimizer))
            gradient, *target = begin(made.elsewhere().made_plan())
            model, optimizer = jdp.restore(folder / "saved", tuple(target))
        metrics, grads = gradient(model, batch, key_of(made, number))
        if module:
            optimizer.update(model, grads)
        else:
            model, optimizer = update(grads, optimizer, model)
        rows.append(floats(metrics))
    if module:
        parted, averages = one_device.Parted(model), average(made, optimizer.opt_state if made.has("ema") else None)
        params, state = one_device.by_path(parted.params), parted.state
    else:
        params, state, averages = one_device.by_path(model), {}, average(made, optimizer)
    return one_device.Run(rows, *map(jax.device_get, (params, {**state, **numbered(averages)})), {}, {}), repr(
        gradient.plan
    )


# Comparing.


def check(names, folder):
    """Train with these features: equal to one device, or refused before the first step as `REFUSED` says."""
    made = setup(*names)
    if words := REFUSED.get(made.names):
        try:
            by_jdp(made, folder)
        except ValueError as error:
            assert re.search(words, str(error)), error
            return
        raise AssertionError(f"{sorted(names)} is not refused")
    (got, plan_text), (want, start) = by_jdp(made, folder), by_hand(made)
    if made.has("own_loop"):
        want.opt_state, want.metrics = {}, [{name: row[name] for name in got.metrics[0]} for row in want.metrics]
    bound = sum(LOSSY.get(name, 0) for name in names)
    apart = [entry for entry in one_device.compared(got, want) if not entry[1] <= BOUND]
    if bound:
        exact = "step .: (weight|skipped)" if made.names & INEXACT else "step .: (weight|skipped)|step 0: (loss|size)"
        apart = [entry for entry in apart if re.match(exact, entry[0])] + strayed(got, want, start, bound)
    elif made.has("noise_scale") and not made.names & {"group", "batch_norm", "gather_rows"}:
        measured, expected = got.metrics[0]["noise_scale"], noise_scale_by_hand(made)
        apart += [("noise scale", 0, measured, expected)] if not abs(measured / expected - 1) < 1e-3 else []
    listed = "\n".join(f"  {name}: got {a}, expected {b}" for name, _, a, b in apart[:12])
    assert not apart, f"{made}\n{plan_text}\n{listed}"


def strayed(got, want, start, bound):
    """What is further off than `bound`: losses, and parameters in relation to how far they moved."""
    square = lambda a, b: sum(np.square(a[path] - np.asarray(b[path])).sum() for path in b)  # noqa: E731
    update = float(np.sqrt(square(got.params, want.params) / square(want.params, one_device.by_path(start))))
    losses = [(a["loss"], b["loss"]) for a, b in zip(got.metrics, want.metrics, strict=True)]
    found = [("update", update, update, bound), *((f"loss {a}", abs(a / b - 1), a, b) for a, b in losses)]
    return [entry for entry in found if not entry[1] <= bound]


def noise_scale_by_hand(made):
    """Of the first step (`jdp.core.noise_scale`), from the gradient of each part of the batch."""
    kind, params, state = initial(made.names & {"lora"}, made.start_case)
    microbatches = made.settings.get("accumulate", 1) if made.strategy == "zero2" else 1
    parts, batch = made.shards * microbatches, batches(made)[0]
    numbers = np.arange(ROWS).reshape(made.shards, -1, microbatches)
    loop = one_device.Loop((kind, params, state), made.by_hand_loss(), made.tx(), is_trained=made.is_trained)

    def square(counts):
        weighed = {**batch, "weight": batch["weight"] * counts}
        grads = jax.grad(lambda some: loop.sums(some, params, state, weighed, key_of(made, 0))[0])(loop.part(params))
        return optax.tree.norm(grads, squared=True)

    masks = [np.isin(np.arange(ROWS), numbers[d, :, k]) for d in range(made.shards) for k in range(microbatches)]
    small = np.mean(jax.vmap(square)(jnp.stack(masks).astype(jnp.float32))) / (ROWS / parts) ** 2
    big = square(jnp.ones(ROWS)) / ROWS**2
    return float(noise_scale.ratio(noise_scale.updated(jnp.zeros(3), small, big, ROWS, parts)))
