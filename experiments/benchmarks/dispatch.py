"""What a step costs the host before the devices can start: calling jdp's step, against the least that JAX allows.

    python experiments/benchmarks/dispatch.py [--rounds 2000] [--layers 24] [--devices 1] [--strategy ddp] [--json]

A toy NNX model of 24 unrolled layers gives a train state of 364 tiny arrays (15 a layer, and four). "jdp" is
`train_step(state, batch)`, as a user calls it. "flat" is a jitted function of the same 364 arrays in one list, donated
too, that runs the same program: only JAX's own work per array is left. They take turns; results are waited for between
calls. The number is the processor time of the calling thread until the call returns: the program runs in other threads,
other users elsewhere.

With `--gradient` the call is `jdp.value_and_grad`'s outside of jit, on as many arrays in nested dictionaries; "tree" is
a jitted function of the same dictionaries. JAX's own work on them is part of both.

Promised: at most 1.10; `scaling.py` has 50, 400 and 2,000 leaves.

Measured 2026-11-23 on 2 x86 cores shared with other programs, jax 0.10.2, Python 3.11.7:

    1 device              before   1.20 ± 0.01; ratio of the least times 1.24 (469 us / 380 us)
                          now      1.02 ± 0.01; 1.02 (391 us / 383 us)
    4 devices, zero3      before   1.14 ± 0.02; 1.31
                          now      1.04 ± 0.02; 1.04
    1 device, --gradient  before   3.0 ± 0.1; 4.5
                          now      1.01 ± 0.03 to 1.19 ± 0.03; 1.06 to 1.17
    1 device, jax 0.12    now      1.06 ± 0.03; 1.06, on Python 3.13

What was saved is the tree's: 50 us to take 364 leaves out of nested dictionaries, 14 to compare structures, 22 to build
the new state. A state that a step returns has the list of its leaves, until a field is read. A loop that reads a tree
of it at each step (`state.params`) pays 23 and 22 of them. A gradient gets its models as trees.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from measure import Row, finish, parser, ratio, show, summary, take_turns

import jdp
from jdp.base.machine import use_cpu_devices

GOAL = 1.10
WIDTH = 8


class Block(nnx.Module):
    """Five parameters: `x + down(relu(up(norm(x))))`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(self.norm(x))))


class Tower(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: Tower, batch: jax.Array, rng: jax.Array | None) -> jdp.Loss:
    return jdp.Loss(jnp.sum(jnp.square(model(batch))), jnp.float32(batch.shape[0]))


def calls(step: jdp.Step, state: jdp.TrainState, batch: jax.Array) -> dict[str, Callable[[], Any]]:
    """Two ways to run the step; each call goes on from its last."""
    tree = jax.tree.structure(state)
    flat_step = jax.jit(lambda leaves, batch: jax.tree.leaves(step(tree.unflatten(leaves), batch)), donate_argnums=0)
    reached = {"jdp": state, "flat": jax.tree.leaves(jax.tree.map(jnp.copy, state))}
    count = tree.num_leaves

    def jdp_call() -> Any:
        reached["jdp"], metrics = step(reached["jdp"], batch)
        return metrics  # all results of a program are there at once

    def flat_call() -> Any:
        after = flat_step(reached["flat"], batch)
        reached["flat"] = after[:count]
        return after[count:]

    return {"jdp": jdp_call, "flat": flat_call}


def gradient_calls(plan: jdp.Plan, layers: int, batch: jax.Array) -> dict[str, Callable[[], Any]]:
    """Two ways to call a gradient of as many arrays as a state with `layers` layers has, in nested dictionaries."""
    graphdef, arrays = nnx.split(Tower(3 * layers, nnx.Rngs(0)))
    structure, params = jax.tree.structure(arrays), jdp.place(nnx.to_pure_dict(arrays), plan)
    key = jax.random.key(1)

    def loss(params: Any, batch: jax.Array, rng: jax.Array) -> jdp.Loss:
        return loss_fn(nnx.merge(graphdef, structure.unflatten(jax.tree.leaves(params))), batch, rng)

    gradient = jdp.value_and_grad(loss, plan)
    jitted = jax.jit(lambda params, batch, key: gradient(params, batch, key))
    return {"jdp": lambda: gradient(params, batch, key)[0], "tree": lambda: jitted(params, batch, key)[0]}


def tree_work(state: jdp.TrainState, repeats: int = 300) -> dict[str, float]:
    """Microseconds of what a tree costs beyond a list: to take it apart, compare its structure, put it together."""
    leaves, tree = jax.tree.flatten(state)
    again = jax.tree.structure(state)
    work = {
        "flatten": lambda: jax.tree.flatten(state),
        "compare": lambda: tree == again,
        "unflatten": lambda: tree.unflatten(leaves),
    }
    return {name: min(_microseconds(once) for _ in range(repeats)) for name, once in work.items()}


def _microseconds(once: Callable[[], Any]) -> float:
    start = time.perf_counter()
    once()
    return (time.perf_counter() - start) * 1e6


def measure(strategy: str, rounds: int, layers: int, of_gradient: bool = False) -> dict[str, Any]:
    plan = jdp.Plan(jdp.make_mesh(data=-1), strategy, min_shard_size=WIDTH)
    state = jdp.init_state(lambda rng: Tower(layers, nnx.Rngs(rng)), optax.adamw(1e-3), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss_fn, plan, clip_norm=1.0)
    batch = jax.device_put(np.ones((8 * plan.batch_shards, WIDTH), np.float32), plan.batch_sharding)
    found = {"leaves": len(jax.tree.leaves(state)), "tree_us": tree_work(state)}
    contenders = gradient_calls(plan, layers, batch) if of_gradient else calls(step, state, batch)
    times = take_turns(contenders, rounds, warmup=20)
    least = "tree" if of_gradient else "flat"
    return found | {
        "call": {name: summary(t.call) for name, t in times.items()},
        "until_done": {name: summary(t.wall) for name, t in times.items()},
        "least": least,
        "ratio": ratio(times["jdp"].call, times[least].call),
        "ratio_until_done": ratio(times["jdp"].wall, times[least].wall),
    }


def report(found: dict[str, Any]) -> None:
    print(f"{found['leaves']} leaves; calling thread's processor time, then wall time until the results are there:")
    for name, call in found["call"].items():
        least, median, done = call["least_ms"], call["median_ms"], found["until_done"][name]["median_ms"]
        print(f"  {name:5} {median * 1e3:5.0f} us (least {least * 1e3:.0f}), {done * 1e3:6.0f} us")
    work = ", ".join(f"{name} {us:.0f} us" for name, us in found["tree_us"].items())
    print(f"  the state's tree: {work}")
    print(f"  jdp / {found['least']} {show(found['ratio'])}; until done {show(found['ratio_until_done'])}")


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--rounds", type=int, default=2000, metavar="N")
    options.add_argument("--layers", type=int, default=24, metavar="N")
    options.add_argument("--devices", type=int, default=1, metavar="N", help="virtual CPU devices")
    options.add_argument("--strategy", default="ddp")
    options.add_argument("--gradient", action="store_true", help="value_and_grad outside of jit in place of a step")
    chosen = options.parse_args()
    use_cpu_devices(chosen.devices)
    found = measure(chosen.strategy, chosen.rounds, chosen.layers, chosen.gradient)
    if not chosen.json:
        report(found)
    against = "the same trees" if chosen.gradient else "the flat leaves"
    called = "`value_and_grad` outside of jit" if chosen.gradient else "a call"
    measures = f"host time of {called} with {found['leaves']} leaves, against a jitted function of {against}"
    row = Row(measures, f"{found['ratio']['median']:.2f} ± {found['ratio']['error']:.2f}", f"≤ {GOAL}")
    finish({"goal": GOAL, "devices": chosen.devices, "strategy": chosen.strategy, **found}, chosen.json, row)


if __name__ == "__main__":
    main()
