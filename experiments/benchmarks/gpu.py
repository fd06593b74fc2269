"""Time GPT-2 124M and a GPT of 1.3 B parameters on one GPU, and compare with PyTorch and with jdp's predictions.

    python experiments/benchmarks/gpu.py [--sizes gpt2-124m,gpt-1.3b] [--rows 8,4] [--forms jdp,…] [--turns 2] [--json]

The contenders are jdp with its defaults, with scanned layers, with remat "dots", and PyTorch (`gpt_torch.py`: compiled,
fused attention, fused AdamW). They take turns, each in its own process, which has the GPU to itself; a number is the
median of the turns. All train on one repeated batch, in bf16 with fp32 weights, a vocabulary of 50,304, and clipped
gradients. MFU counts 6 FLOPs per parameter and token, and 12 · layers · width · length per token for attention
(Chowdhery et al. 2022, appendix B), over the data sheet's peak. The time is compared with `jdp plan`'s timeline of the
program that ran, the memory with the peak of the device's pool. `rates` are those of XLA's matrix products and copies
here, for fitting the time model.

It needs jax, flax, optax and orbax; PyTorch is optional. Without a GPU it only tests itself, with tiny sizes on one CPU
device, whose numbers mean nothing.

Measured 2026-11-27 on one H200 (driver 580.159.04, 16 cores, Python 3.12.3, jax 0.11.2, flax 0.12.10, PyTorch 2.11.0,
CUDA 13.0), one process each: ms per step, MFU, GiB, and `jdp plan`'s prediction for the program:

                               PyTorch compiled     jdp                    remat "dots"
    gpt2-124m, 8 x 1024        18.7  38.1 %   5.1   20.0  35.6 %   4.9     20.0  35.5 %   4.0
        predicted                                   20.5           4.6     20.4           3.8
    gpt2-124m, 32 x 1024       64.1  44.4 %  15.1                          68.5  41.6 %   8.4
        predicted                                                          70.1           8.1
        an hour before         63.5  44.8 %  15.1   74.6  38.2 %  14.7     74.9  38.0 %   8.5
    gpt-1.3b, 4 x 2048                              146.5 51.4 %  33.5     145.6 51.8 %  26.0
        predicted                                   165.8         33.3     163.7         25.7

The rows "an hour before" and of 8 sequences were measured with an older loss and older positions, which copied and
transposed more. PyTorch's 1.3 B did not compile within 90 s there. On one H100 (2026-11-26) the three took 1.02, 1.20
and 0.97 of compiled PyTorch's time. The times of the kernels are in `kernels/`, each file a JSON object of `kernels`,
rows of [HLO instruction, kernel, launches a step, microseconds a step], and `text`, the program. In milliseconds, with
the predictions in brackets: GPT-2's 65.1 are 32.8 (43.4) of products, 8.9 (8.7) of attention and 23.5 (18.0) of the
rest; 1.3 B's 143.2 are 85.3 (113.9), 15.8 (15.7) and 42.4 (34.5). The predicted rate of products is fitted to GPUs at
their power limit, which so short a run does not reach.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process must leave the memory to the workers

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from measure import Row, finish, parser, take_turns

import jdp
from jdp.foresight.program.module import parse
from jdp.foresight.targets.resolve import target_of
from jdp.foresight.timing.timeline import timeline
from jdp.models import SIZES, GPTConfig, build, parameter_count

HERE = Path(__file__).parent
FORMS: dict[str, dict[str, Any]] = {
    "jdp": {},
    "jdp scanned": {"scan": True},
    "jdp dots": {"remat": "dots"},
    "jdp scanned dots": {"scan": True, "remat": "dots"},
}
PRODUCTS = ((8192, 768, 2304), (8192, 768, 3072), (8192, 2048, 8192), (8192, 50304, 768), (8192, 8192, 8192))


def configuration(size: str) -> GPTConfig:
    """Return the model of a size of `gpt_torch.py`."""
    gpt2 = SIZES["gpt2-124m"]
    assert isinstance(gpt2, GPTConfig)
    if size == "gpt-1.3b":
        return replace(gpt2, context=2048, layers=24, width=2048, heads=16)
    if size == "tiny":
        return replace(gpt2, vocab_size=256, context=64, layers=2, width=64, heads=2)
    return gpt2


def loss_fn(model: Any, batch: dict[str, jax.Array], rng: jax.Array | None) -> jdp.Loss:
    return jdp.Loss(*model.loss(batch["tokens"], batch["targets"], batch["weights"], rng=rng))


def measure_jdp(size: str, form: str, rows: int, rounds: int) -> dict[str, Any]:
    """Predict and measure the time and memory of one form's step."""
    config = replace(configuration(size), **FORMS[form])
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1]), "ddp")
    tx = optax.adamw(6e-4, b2=0.95, weight_decay=0.1)
    state = jdp.init_state(lambda rng: build(config, rngs=nnx.Rngs(rng)), tx, plan, rng=jax.random.key(0))
    tokens, targets = np.random.default_rng(0).integers(0, config.vocab_size, (2, rows, config.context), np.int32)
    weights = np.ones(tokens.shape, np.float32)
    batch = jax.device_put({"tokens": tokens, "targets": targets, "weights": weights}, plan.batch_sharding)
    step = jdp.make_train_step(loss_fn, plan, precision="bf16", clip_norm=1.0)
    compiled = step.compile(state, batch)
    held = [state]

    def ten_steps() -> Any:
        for _ in range(10):  # queued one after another, as in PyTorch
            held[0], metrics = step(held[0], batch)
        return metrics

    seconds = statistics.median(take_turns({"steps": ten_steps}, rounds, warmup=1)["steps"].wall) / 10
    memory = jax.devices()[0].memory_stats() or {}
    analysis = compiled.memory_analysis()
    here = target_of(None)
    predicted = None if here.chip is None else timeline(parse(compiled.as_text()), here).step_seconds
    flops = 6 * parameter_count(config) + 12 * config.layers * config.width * config.context
    return {
        "step_ms": 1e3 * seconds,
        "predicted_ms": None if predicted is None else 1e3 * predicted,
        "tokens_per_second": rows * config.context / seconds,
        "flops": flops * rows * config.context,
        "peak_gib": memory["peak_bytes_in_use"] / 2**30 if memory else None,
        "predicted_gib": (analysis.temp_size_in_bytes + analysis.argument_size_in_bytes) / 2**30,
    }


def measure_rates(rounds: int) -> dict[str, float]:
    """Return TFLOP/s of bf16 products [m, k] x [k, n], and GB/s of a copy that reads 1 GiB and writes 1 GiB."""
    tiny = jax.default_backend() == "cpu"
    rates: dict[str, float] = {}
    for m, n, k in ((64, 64, 64),) if tiny else PRODUCTS:
        a, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)
        product = jax.jit(lambda a, b: jax.lax.fori_loop(0, 50, lambda _, x: x + 1e-9 * (x @ b) @ b.T, a))
        seconds = take_turns({"it": lambda a=a, b=b, f=product: f(a, b)}, rounds)["it"].wall.min()
        rates[f"[{m}, {k}] x [{k}, {n}]"] = 50 * 4 * m * n * k / seconds / 1e12
    x = jnp.zeros(2**16 if tiny else 2**28, jnp.float32)
    seconds = take_turns({"it": lambda: jax.jit(lambda x: x + 1)(x)}, rounds)["it"].wall.min()
    return rates | {"copy": 2 * x.nbytes / seconds / 1e9}


def in_a_process(*words: str) -> dict[str, Any]:
    """Run a part of this benchmark in its own process; return its JSON."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    done = subprocess.run([sys.executable, *words], env=own, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(size: str, rows: int, forms: list[str], turns: int, rounds: int) -> dict[str, Any]:
    """Return each contender's median over the turns."""
    here_words = (str(HERE / "gpu.py"), "--size", size, "--rows", str(rows), "--rounds", str(rounds))
    contenders = {form: (*here_words, "--worker", form) for form in forms}
    if find_spec("torch") is not None:
        contenders["torch"] = (str(HERE / "gpt_torch.py"), "--size", size, "--rows", str(rows), "--json")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, words in contenders.items():
            runs[name].append(in_a_process(*words))
            print(size, rows, name, json.dumps(runs[name][-1]), file=sys.stderr, flush=True)
    return {name: sorted(each, key=lambda run: run["step_ms"])[len(each) // 2] for name, each in runs.items()}


def show(size: str, found: dict[str, Any], peak: float | None) -> None:
    print(f"{size}:{'' if 'torch' in found else ' PyTorch is not installed'}")
    for name, run in found.items():
        line = f"  {name:12} {run['step_ms']:8.1f} ms {run['tokens_per_second']:10,.0f} tokens/s"
        line += f"  MFU {run['flops'] / run['step_ms'] * 1e3 / peak:.1%}" if peak else ""
        line += f"  {run['peak_gib']:.1f} GiB" if run["peak_gib"] else ""
        if run.get("predicted_ms"):
            line += f"  predicted {run['predicted_ms']:.1f} ms, {run['predicted_gib']:.1f} GiB"
        print(line, flush=True)


def headline(sizes: dict[str, Any], peak: float | None) -> str:
    """Return for each size the best form's MFU, its speed relative to PyTorch, and predicted / measured time."""
    parts: list[str] = []
    for size, found in sizes.items():
        best = min((run for name, run in found.items() if name in FORMS), key=lambda run: run["step_ms"])
        mfu = f"MFU {best['flops'] / best['step_ms'] * 1e3 / peak:.1%}, " if peak else ""
        torch = found.get("torch")
        against = f"{torch['step_ms'] / best['step_ms']:.2f} × PyTorch's tokens/s, " if torch else ""
        found_ms = best["predicted_ms"]
        predicted = f"predicted / measured {found_ms / best['step_ms']:.2f}" if found_ms else "not predicted"
        parts.append(f"{size}: {mfu}{against}{predicted}")
    return "; ".join(parts)


def options() -> argparse.ArgumentParser:
    made = parser(__file__, __doc__)
    on_gpu = jax.default_backend() == "gpu"
    made.add_argument("--sizes", default="gpt2-124m,gpt-1.3b" if on_gpu else "tiny", metavar="NAME,…")
    made.add_argument("--rows", default="8,4" if on_gpu else "2", metavar="N,…", help="sequences per step of each size")
    made.add_argument("--forms", default="jdp,jdp scanned,jdp dots", metavar="NAME,…", help=f"of {', '.join(FORMS)}")
    made.add_argument("--turns", type=int, default=2, metavar="N", help="processes of each contender")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds of ten steps in a process")
    made.add_argument("--size", help=argparse.SUPPRESS)
    made.add_argument("--worker", choices=FORMS, help=argparse.SUPPRESS)
    return made


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    given = options().parse_args()
    if given.worker is not None:
        print(json.dumps(measure_jdp(given.size, given.worker, int(given.rows), given.rounds)))
        return
    described = target_of(None)
    peak = None if described.chip is None else described.chip.matmul_flops["bf16"]
    sizes: dict[str, Any] = {}
    for size, rows in zip(given.sizes.split(","), given.rows.split(","), strict=True):
        name = f"{size}, {rows} sequences"
        sizes[name] = compare(size, int(rows), given.forms.split(","), given.turns, given.rounds)
        if not given.json:
            show(name, sizes[name], peak)
    rates = measure_rates(given.rounds)
    if not given.json:
        print(", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    row = Row("GPTs trained on one GPU, the best form", headline(sizes, peak), "see its note")
    finish({"sizes": sizes, "peak_flops": peak, "rates": rates}, given.json, row)


if __name__ == "__main__":
    main()
