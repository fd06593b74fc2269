"""Features of a training step, each as a change of one small setup, and training with any of them together.

`FEATURES` is the table. `by_jdp` trains a setup as a user would; `by_hand` on one device by `one_device`. `check`
compares. What loses digits (`LOSSY`) is held to the error of its
encoding, as a part of how far the parameters moved, and to exact weights and first losses.
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

ALL = ("ddp", "zero1", "zero2", "zero3")
ROWS, BOUND, DECAY = 32, 5e-6, 0.8


@dataclass(frozen=True)
class Feature:
    """What a feature changes, where it does something, and of which others it is another setting (`kind`)."""

    case: dict = field(default_factory=dict)
    mesh: dict = field(default_factory=dict)
    step: dict = field(default_factory=dict)
    strategies: tuple = ALL
    kind: str | None = None


def wire(encoding):
    return Feature({"optimizer": "momentum", "width": 256}, step={"wire": encoding}, kind="wire")


LAYERS = {"layers": 2, "stacked": True}
FEATURES = {
    "bf16": wire("bf16"),
    "int8": wire("int8"),
    "replica": Feature(mesh={"replica": 2}),
    "offload": Feature(),
    "pad": Feature({"width": 7}, mesh={"data": 4}, kind="width"),
    "ema": Feature(),
    "lora": Feature({"model": "nnx"}, kind="wrt"),
    "wrt": Feature({"frozen": "same"}, kind="wrt"),
    "accumulate": Feature(step={"accumulate": 2}),
    "overlap": Feature(LAYERS, step={"overlap": True}, strategies=ALL[2:]),
    "scan_layers": Feature(LAYERS),
    "batch_norm": Feature({"model": "nnx", "state": "norm"}),
    "dropout": Feature({"noise": "mask"}),
    "own_loop": Feature({"model": "nnx"}),
    "resume": Feature(),
    "model_axis": Feature(mesh={"model": 2}),
    "gather_rows": Feature(),
    "clip_norm": Feature({"clip_norm": 0.3}, step={"clip_norm": 0.3}),
    "eval": Feature(),
}
LOSSY = {"bf16": 8e-3, "int8": 0.03}
STEPS_ALONE = ("clip_norm", "eval")  # a loop of one's own has no such settings
_REFUSED = (
    ("gather_rows", ("accumulate",), "gather_rows gathers the rows of one microbatch.*accumulate=2"),
    ("own_loop", ("offload",), "offload"),
)
REFUSED = {frozenset((one, two)): words for one, others, words in _REFUSED for two in others}
"""Pairs that are refused, in these words."""


def pairs():
    """Every two features that are not one setting."""
    for one, two in itertools.combinations(FEATURES, 2):
        same = FEATURES[one].kind is not None and FEATURES[one].kind == FEATURES[two].kind
        if not same and not ("own_loop" in (one, two) and {one, two} & {*STEPS_ALONE}):
            yield one, two


@dataclass(frozen=True)
class Setup:
    """A training run with features."""

    names: frozenset
    case: Case
    strategy: str = "ddp"
    axes: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)

    def has(self, name):
        return name in self.names

    @property
    def wrt(self):
        own = {"wrt": nnx.All(nnx.Param, nnx.Not(nnx.PathContains("enter")))} if self.case.model == "nnx" else {}
        return next(({"lora": nnx.LoRAParam, "wrt": "[!e]*", **own}[n] for n in ("lora", "wrt") if self.has(n)), None)

    def is_trained(self, path):
        return "lora_" in path if self.has("lora") else not (self.has("wrt") and path.startswith("e"))

    def tx(self):
        tx = OPTIMIZERS[self.case.optimizer]()
        return jdp.with_ema(tx, DECAY) if self.has("ema") else tx

    def plan(self):
        name = "*enter*kernel" if self.case.model == "nnx" else "enter"
        fits = "model" in self.axes and self.case.width % 2 == 0
        rules = [(name, PartitionSpec(None, "model"))] if fits else []
        mesh = jdp.make_mesh(devices=jax.devices()[: int(np.prod([*self.axes.values()]))], **self.axes)
        offload = "optimizer" if self.has("offload") else None
        return jdp.Plan(mesh, self.strategy, min_shard_size=8, rules=rules, offload=offload)

    def elsewhere(self):
        """The same run under another strategy, on another number of devices."""
        allowed = strategies(self.names)
        other = allowed[(allowed.index(self.strategy) + 1) % len(allowed)]
        return replace(self, strategy=other, axes={**self.axes, "data": 6 - self.axes["data"]})

    def batches(self):
        """Three, the second one with eight times the first's weights."""
        drawn = zip(drawn_models.batches(self.case), (1, 8, 0.5), strict=True)
        return [{**batch, "weight": batch["weight"] * np.float32(factor)} for batch, factor in drawn]


def strategies(names):
    return [s for s in ALL if all(s in FEATURES[name].strategies for name in names)]


def setup(names, turn=0):
    """The setup with these features: strategies, and who chooses the partitioning, go around; `turn` shifts them."""
    merged = ({}, {}, {})
    for name in names:
        for whole, own in zip(merged, (FEATURES[name].case, FEATURES[name].mesh, FEATURES[name].step), strict=True):
            whole.update(own)
    fields, mesh, settings = merged
    allowed = strategies(names)
    number = turn + sum(list(FEATURES).index(name) for name in names)
    if number // len(allowed) % 2:
        settings["partitioning"] = "manual"
    case = Case(**{"rows": ROWS, "weights": "uneven", "metrics": "own", "optimizer": "adamw", **fields})
    axes = {"data": 2 if mesh.keys() & {"replica", "model"} else 4} | mesh
    axes = {name: axes[name] for name in ("replica", "data", "model") if name in axes}
    return Setup(frozenset(names), case, allowed[number % len(allowed)], axes, settings)


class Adapted(drawn_models.Net):
    """The drawn model with a low-rank update of its first layer."""

    def __init__(self, case, rngs):
        super().__init__(case, rngs)
        self.enter = nnx.LoRA(drawn_models.FEATURES, 4, case.width, base_module=self.enter, rngs=rngs)


def init(made, key):
    return Adapted(made.case, nnx.Rngs(key)) if made.has("lora") else drawn_models.init(made.case, key)


def loss(made, loop, gather, model, batch, key):
    """The drawn models' (total, weight, metrics), with negatives of the whole batch where rows are gathered."""
    total, weight, metrics = drawn_models.loss(made.case, loop, model, batch, key)
    if made.has("gather_rows"):
        first = model.enter(jnp.eye(drawn_models.FEATURES)) if made.case.model == "nnx" else model["enter"]
        others, own = gather(batch["x"] @ first)
        total += optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ first @ others.T, own).sum()
    return total, weight, metrics


# By hand.


@functools.cache
def initial(names, case):
    return one_device.initial(functools.partial(init, Setup(names, case)), case.seed)


def loop_of(made):
    simplest = replace(made.case, clip_norm=None, weights="ones", term=None, optimizer="sgd")
    return one_device.Loop(
        initial(made.names & {"lora"}, simplest),
        functools.partial(loss, made, one_device.loop, lambda x: (x, jnp.arange(len(x)))),
        made.tx(),
        clip_norm=made.case.clip_norm,
        is_trained=made.is_trained,
        microbatches=made.settings.get("accumulate", 1) if made.case.keeps else 1,
    )


def by_hand(made, loop):
    """Train on one device."""
    rows, params, opt_state, state = one_device.steps(loop, made.batches(), made.case.seed)
    averages, evaluated = average(made, opt_state), {}
    if made.has("eval"):
        seen = loop.together(params, averages) if made.has("ema") else params
        evaluated = one_device.evaluation(loop, seen, state, made.batches()[-1])
    trees = (one_device.by_path(params), {**state, **numbered(averages)}, one_device.by_path(opt_state))
    return one_device.Run(rows, *map(jax.device_get, trees), evaluated)


def average(made, opt_state):
    """The average that `with_ema` keeps; None without it."""
    return opt_state.average if made.has("ema") else None


def numbered(averages):
    return {f"average {i}": leaf for i, leaf in enumerate(jax.tree.leaves(averages))}


# By jdp.


def by_jdp(made, folder):
    loss_fn = lambda *given: jdp.Loss(*loss(made, jdp.scan_layers, jdp.gather_rows, *given))  # noqa: E731
    start, key = functools.partial(init, made), jax.random.key(made.case.seed)
    if made.has("own_loop"):
        return own_loop(made, loss_fn, start, key, folder)
    plan, tx, rows, evaluated, averages = made.plan(), made.tx(), [], {}, {}
    step = jdp.make_train_step(loss_fn, plan, **made.settings)
    state = jdp.init_state(start, tx, plan, rng=key, wrt=made.wrt)
    for number, batch in enumerate(made.batches()):
        if number == 2 and made.has("resume"):
            jdp.save(folder / "saved", state)
            plan = made.elsewhere().plan()
            step = jdp.make_train_step(loss_fn, plan, **made.settings)
            state = jdp.restore(folder / "saved", jdp.abstract_state(start, tx, plan, rng=key, wrt=made.wrt))
        state, metrics = step(state, batch)
        rows.append(one_device.floats(metrics))
    seen = jdp.ema_params(state) if made.has("ema") else state
    if made.has("ema"):
        leaves = one_device.by_path(seen.unpadded().params)
        averages = {path: leaf for path, leaf in leaves.items() if made.is_trained(path)}
    if made.has("eval"):
        names = {"accumulate", "precision", "partitioning"} & made.settings.keys()
        step = jdp.make_eval_step(loss_fn, plan, **{name: made.settings[name] for name in names})
        evaluated = one_device.floats(step(seen, batch))
    state = state.unpadded()
    others = {**one_device.by_path(state.model_state), **numbered(averages)}
    trees = (one_device.by_path(state.params), others, one_device.by_path(state.opt_state))
    return one_device.Run(rows, *map(jax.device_get, trees), evaluated)


def own_loop(made, loss_fn, start, key, folder):
    """The same by `jdp.value_and_grad`, with an optimizer of one's own: without norms, and what a step skips."""

    def begin(plan):
        gradient = jdp.value_and_grad(loss_fn, plan, wrt=made.wrt, **made.settings)
        make = lambda model: nnx.Optimizer(model, made.tx(), wrt=made.wrt or nnx.Param)  # noqa: E731
        model = jdp.init(start, plan, rng=key)
        return gradient, model, jdp.init(make, plan, of=model)

    (gradient, model, optimizer), rows = begin(made.plan()), []
    for number, batch in enumerate(made.batches()):
        if number == 2 and made.has("resume"):
            jdp.save(folder / "saved", (model, optimizer))
            gradient, *target = begin(made.elsewhere().plan())
            model, optimizer = jdp.restore(folder / "saved", tuple(target))
        metrics, grads = gradient(model, batch, one_device.key_of(made.case.seed, number))
        optimizer.update(model, grads)
        rows.append(one_device.floats(metrics))
    parted, averages = one_device.Parted(model), average(made, optimizer.opt_state)
    trees = (one_device.by_path(parted.params), {**parted.state, **numbered(averages)}, {})
    return one_device.Run(rows, *map(jax.device_get, trees), {})


# Comparing.


def check(names, folder, turn=0):
    """Train with these features: equal to one device, or refused as `REFUSED` says."""
    made = setup(names, turn)
    if words := REFUSED.get(made.names):
        try:
            by_jdp(made, folder)
        except ValueError as error:
            assert re.search(words, str(error)), error
            return
        raise AssertionError(f"{names} are not refused")
    loop = loop_of(made)
    got, want, bound = by_jdp(made, folder), by_hand(made, loop), sum(LOSSY.get(name, 0) for name in names)
    if made.has("own_loop"):
        want.opt_state, want.metrics = {}, [{name: row[name] for name in got.metrics[0]} for row in want.metrics]
    apart = [entry for entry in one_device.compared(got, want) if not entry[1] <= BOUND]
    if bound:
        exact = "step .: (weight|skipped)|step 0: (loss|size)"
        apart = [entry for entry in apart if re.match(exact, entry[0])] + strayed(got, want, loop, bound)
    listed = "\n".join(f"  {name}: got {a}, expected {b}" for name, _, a, b in apart[:12])
    assert not apart, f"{made}\n{listed}"


def strayed(got, want, loop, bound):
    """What is further off than `bound`: losses, and parameters as a part of how far they moved."""
    square = lambda a, b: sum(np.square(a[path] - np.asarray(b[path])).sum() for path in b)  # noqa: E731
    update = float(np.sqrt(square(got.params, want.params) / square(want.params, one_device.by_path(loop.params))))
    losses = [(a["loss"], b["loss"]) for a, b in zip(got.metrics, want.metrics, strict=True)]
    found = [("update", update, update, bound), *((f"loss {a}", abs(a / b - 1), a, b) for a, b in losses)]
    return [entry for entry in found if not entry[1] <= bound]
