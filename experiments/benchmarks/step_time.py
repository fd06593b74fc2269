"""Compare the time of jdp's training step with the same step written by hand in JAX, Flax and optax (`raw_steps.py`).

    python experiments/benchmarks/step_time.py [--rounds 20] [--strategies ddp,zero1,zero3] [--json]

Both have the same model (gpt-nano: 0.8 M parameters, scanned layers), batch (16 x 128 tokens), optimizer (adamw,
gradients clipped by their global norm), shardings, and four virtual CPU devices. The hand-written step has two forms,
`shard_map` and `jit` with constraints; jdp's manual partitioning has the form of the first, auto that of the second,
and "jdp" alone is its own choice. jdp always has its finite guard; the hand-written step is timed with one and without.
First it is checked that the shardings are equal, and that the losses of four steps agree to 1e-5.

Promised: at most 1.03 times the hand-written step of the same form.

Measured 2026-11 on 2 x86 cores shared with other programs (load 2 to 7), jax 0.10.2 on Python 3.11.7, 40 rounds: ratio
of processor time, ± half the 95% interval of the median.

    jdp / by hand        ddp              zero1            zero3
    manual / shard_map   1.006 ± 0.007    1.002 ± 0.009    1.004 ± 0.011
      without guard      1.021 ± 0.008    1.004 ± 0.009    1.014 ± 0.012
    auto / jit           0.998 ± 0.005    0.998 ± 0.012    1.009 ± 0.014
      without guard      1.014 ± 0.005    1.015 ± 0.009    1.007 ± 0.008
    manual / jit         1.071 ± 0.009    1.084 ± 0.010    1.101 ± 0.020

The first line on 2026-11-21, with partial training and BatchNorm in the step, under load 5:

    manual / shard_map   1.006 ± 0.023    0.998 ± 0.038    1.008 ± 0.027

zero3 on 2026-11-22, with a norm that does not overflow and a guard of the model state, 20 rounds, load 3: 0.993 ±
0.055.

jax 0.11.2 on Python 3.12.3, ten idle cores of 16, 20 rounds: 1.037 ± 0.050, 1.012 ± 0.033 and 0.988 ± 0.034; in wall
time 1.002, 1.043 and 1.011, ± 0.04 to 0.06.

jax 0.12.0.1 on Python 3.13, 20 rounds: 0.99 to 1.03 in the first four lines, 1.08 to 1.10 in the last. In wall time
0.99 to 1.04 and 1.05 to 1.11, with twice to four times the error. Losses (0.10.2) are equal to the last bit between
manual and shard_map, and between auto and jit. The last line is the cost of the manual form on CPU, by hand too: in its
compiled program the layers' weight gradients are plain dots, but XLA:CPU fuses them if an all-reduce follows them in
the loop. On GPUs manual is chosen because it sends less (`traffic.py`).

Loops that stack 128 bytes per iteration, as layers and microbatches stack small results: microseconds of processor time
per iteration, the least of five calls. XLA:CPU of jaxlib 0.11.1 rewrites the whole stack for less than 256 bytes (jax
#40101). The loops of jdp have at most some hundred iterations, so a stack costs less than 1 us per iteration.

    iterations         64      1,024    16,384
    jax 0.10.2         0.11    0.02     0.02
    jax 0.11.1         0.39    4.78     75.31
    jax 0.11.2         0.12    0.03     0.02
    jax 0.12.0.1       0.12    0.03     0.02
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from measure import Row, finish, parser, ratio, show, summary, take_turns
from raw_steps import VIEWS, make

import jdp
from jdp.base.machine import use_cpu_devices
from jdp.foresight.program.collectives import collectives
from jdp.models import GPT, GPTConfig, next_token_loss

GOAL = 1.03
DEVICES = 4
ROWS, LENGTH = 16, 128
CLIP_NORM = 1.0
STEPS_COMPARED = 4
TX = optax.adamw(1e-3)
GPT_NANO = GPTConfig(vocab_size=256, context=256, layers=4, width=128, heads=4, kv_heads=2, tied=True)
FORM = {"manual": "shard_map", "auto": "jit"}


@dataclass
class Contender:
    """A step and its current state; each call takes one more step."""

    advance: Callable[[Any, Any], tuple[Any, jax.Array]]  # (state, batch) -> (state, loss)
    state: Any
    params: dict[str, jax.Array]  # the initial parameters, by path
    lowered: jax.stages.Lowered
    partitioning: str | None = None

    def step(self, batch: Any) -> jax.Array:
        self.state, loss = self.advance(self.state, batch)
        return loss


def loss_fn(model: GPT, batch: dict[str, jax.Array], rng: jax.Array | None) -> jdp.Loss:
    logits = model(batch["tokens"], rng=rng)
    return jdp.Loss(*next_token_loss(logits, batch["targets"], batch["weights"]))


def ours(strategy: str, partitioning: str | None, mesh: Any, batch: Any, seed: jax.Array) -> Contender:
    plan = jdp.Plan(mesh, strategy)
    state = jdp.init_state(lambda rng: GPT(GPT_NANO, rngs=nnx.Rngs(rng)), TX, plan, rng=seed)
    step = jdp.make_train_step(loss_fn, plan, partitioning=partitioning, clip_norm=CLIP_NORM)

    def advance(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    lowered = step.lower(state, batch)
    return Contender(advance, state, _by_path(state.params), lowered, step.partitioning)


def by_hand(strategy: str, view: str, guard: bool, mesh: Any, batch: Any, seed: jax.Array) -> Contender:
    raw = make(GPT_NANO, TX, mesh, strategy, view=view, clip_norm=CLIP_NORM, guard=guard, seed=seed)

    def advance(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        *state, loss, _norm = raw.step(*state, batch)
        return state, loss

    state = (raw.params, raw.opt_state)
    params = _by_path(nnx.to_pure_dict(raw.params))
    return Contender(advance, state, params, raw.step.lower(*state, batch))


def compare(strategy: str, mesh: Any, rounds: int) -> dict[str, Any]:
    """Build all contenders for one strategy, check that they compute the same, and time them in turns."""
    seed, data = jax.random.key(0), batches(STEPS_COMPARED, jdp.Plan(mesh).batch_sharding)
    setting = (mesh, data[0], seed)
    made = {"jdp": ours(strategy, None, *setting)}
    made |= {f"jdp {way}": ours(strategy, way, *setting) for way in FORM if way != made["jdp"].partitioning}
    for view in VIEWS:
        made[f"raw {view}"] = by_hand(strategy, view, True, *setting)
        made[f"raw {view}, no guard"] = by_hand(strategy, view, False, *setting)
    losses = _check_alike(made, data)
    times = take_turns({name: (lambda one=one: one.step(data[0])) for name, one in made.items()}, rounds)
    pairs = [
        (name, f"raw {FORM[one.partitioning]}{guard}")
        for name, one in made.items()
        if one.partitioning
        for guard in ("", ", no guard")
    ]
    pairs += [("jdp", f"raw {view}") for view in VIEWS if view != FORM[made["jdp"].partitioning]]
    return {
        "chosen": made["jdp"].partitioning,
        "losses": losses,
        "processor_time": {name: summary(times[name].cpu) for name in made},
        "wall_time": {name: summary(times[name].wall) for name in made},
        "collectives": {name: _collectives(one.lowered) for name, one in made.items()},
        "processor_ratio": {f"{a} / {b}": ratio(times[a].cpu, times[b].cpu) for a, b in pairs},
        "wall_ratio": {f"{a} / {b}": ratio(times[a].wall, times[b].wall) for a, b in pairs},
    }


def batches(count: int, sharding: Any) -> list[dict[str, jax.Array]]:
    """Return batches of random tokens, with weight 0 at one position in ten."""
    rng, shape = np.random.default_rng(0), (ROWS, LENGTH)

    def batch() -> dict[str, np.ndarray]:
        tokens, targets = rng.integers(0, GPT_NANO.vocab_size, (2, *shape), np.int32)
        return {"tokens": tokens, "targets": targets, "weights": (rng.random(shape) < 0.9).astype(np.float32)}

    return [jax.device_put(batch(), sharding) for _ in range(count)]


def _check_alike(made: dict[str, Contender], data: list[Any]) -> dict[str, list[float]]:
    first = made["jdp"].params
    for name, one in made.items():
        different = [p for p, x in one.params.items() if not x.sharding.is_equivalent_to(first[p].sharding, x.ndim)]
        if different or one.params.keys() != first.keys():
            raise SystemExit(f"jdp and {name} do not lay their parameters alike: {different}")
    losses = {name: [float(one.step(batch)) for batch in data] for name, one in made.items()}
    for name, values in losses.items():
        if not np.allclose(values, losses["jdp"], rtol=1e-5):
            raise SystemExit(f"jdp and {name} do not compute the same: losses {losses['jdp']} and {values}")
    return losses


def _by_path(params: Any) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(params)}


def _collectives(lowered: jax.stages.Lowered) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in collectives(lowered.compile().as_text()):
        if one.group_size > 1:
            counts[one.kind] = counts.get(one.kind, 0) + one.count
    return counts


def report(strategy: str, found: dict[str, Any]) -> None:
    print(f"{strategy}: jdp chose {found['chosen']}; losses {', '.join(f'{x:.6f}' for x in found['losses']['jdp'])}")
    for name, cpu in found["processor_time"].items():
        wall, sent = found["wall_time"][name], found["collectives"][name]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(sent.items()))
        print(f"  {name:26} {cpu['median_ms']:6.1f} ms processor, {wall['median_ms']:6.1f} ms wall; {kinds}")
    for pair, cpu in found["processor_ratio"].items():
        print(f"  {pair:44} {show(cpu)}; wall {show(found['wall_ratio'][pair])}")
    print(flush=True)


def loops() -> dict[int, float]:
    """Return number of iterations -> microseconds per iteration, for a loop that stacks 128 bytes in each."""
    found: dict[int, float] = {}
    for count in (64, 1024, 16384):
        loop = jax.jit(lambda x, count=count: jax.lax.scan(lambda x, _: (0.99 * x + 0.1, x), x, None, length=count)[1])
        times = [_processor_seconds(loop, jnp.ones(32)) for _ in range(6)]
        found[count] = min(times[1:]) / count * 1e6
    return found


def _processor_seconds(call: Callable[..., Any], *given: Any) -> float:
    start = time.process_time()
    jax.block_until_ready(call(*given))
    return time.process_time() - start


def headline(found: dict[str, Any]) -> str:
    """Return for each strategy the ratio of processor time to the hand-written step of the chosen form."""
    ratios = {name: one["processor_ratio"][f"jdp / raw {FORM[one['chosen']]}"] for name, one in found.items()}
    return ", ".join(f"{r['median']:.3f} ± {r['error']:.3f} `{name}`" for name, r in ratios.items())


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--rounds", type=int, default=20, metavar="N")
    options.add_argument("--strategies", default="ddp,zero1,zero3")
    chosen = options.parse_args()
    use_cpu_devices(DEVICES)
    mesh, found = jdp.make_mesh(data=DEVICES), {}
    for strategy in chosen.strategies.split(","):
        found[strategy] = compare(strategy, mesh, chosen.rounds)
        if not chosen.json:
            report(strategy, found[strategy])
    small = loops()
    if not chosen.json:
        each = ", ".join(f"{microseconds:.2f} us in {count:,}" for count, microseconds in small.items())
        print(f"an iteration of a loop that stacks 128 bytes: {each}")
    measures = f"a step against a hand-written JAX step of the same form, finite guard included; {DEVICES} CPU devices"
    finish(
        {"goal": GOAL, "strategies": found, "loop_us": small}, chosen.json, Row(measures, headline(found), f"≤ {GOAL}")
    )


if __name__ == "__main__":
    main()
