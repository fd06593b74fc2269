"""The cross-entropy of next tokens and its gradients from features: in chunks, beside whole float32 logits.

    python experiments/benchmarks/loss.py [--target h100:1x1] [--rounds 8] [--json]

bf16 features and head for a GPU (described, compiled, not run: bytes of temporaries and of memory traffic, and
simulated time), fp32 on this CPU (processor time in turns, and temporaries), where chunks are those of `--chunk-mib`
for comparison: by itself jdp computes logits of up to 512 MiB whole there.

2026-11 (jax 0.10.2; 2 cores, load 13; loss and both gradients, tied):

| | in chunks: held, moved, time | whole |
|---|---|---|
| gpt2-124m, 8 × 1024, 50,257 of 768, H100 | 0.81 GiB, 9.4 GiB, 5.1 ms | 1.5 GiB, 11.0 GiB, 5.7 ms |
| gpt-1b, 4 × 2048, 50,304 of 2048, H100 | 0.81 GiB, 12.9 GiB, 10.9 ms | 1.5 GiB, 11.4 GiB, 11.2 ms |
| llama-8b, 1 × 8192, 128,256 of 4096, H100 | 2.2 GiB, 70 GiB, 51.3 ms | 3.9 GiB, 31 GiB, 51.0 ms |
| 256 × 50,304 of 128, CPU, chunks of 4 MiB | 29 MiB, processor time 1.29 ± 0.03 | 98 MiB, 1 |

What is moved more is the head's float32 gradient, read and written for each chunk, while products are computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from attention import MIB, foreseen, lowered, on_this_cpu
from measure import Row, finish, parser, show

from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets.resolve import target
from jdp.models import linear_next_token_loss, next_token_loss
from jdp.models.losses import CHUNK_BYTES
from jdp.models.modules import product

ON_GPU = {"gpt2-124m": (8, 1024, 768, 50_257), "gpt-1b": (4, 2048, 2048, 50_304), "llama-8b": (1, 8192, 4096, 128_256)}
ON_CPU = {"quickstart": (4, 128, 128, 256), "vocabulary of 50304": (1, 256, 128, 50_304)}


def in_chunks(chunk_bytes: int, *operands: jax.Array) -> Any:
    """Return the gradients of the loss by features and table."""
    loss = functools.partial(linear_next_token_loss, tied=True, chunk_bytes=chunk_bytes)
    return jax.grad(lambda *given: loss(*given)[0], argnums=(0, 1))(*operands)


def whole(x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
    """Return the same gradients by way of all logits."""

    def loss(x: jax.Array, table: jax.Array) -> jax.Array:
        return next_token_loss(product("...d,vd->...v", x, table), targets, weights)[0]

    return jax.grad(loss, argnums=(0, 1))(x, table)


def operands(shape: tuple[int, ...], dtype: Any) -> list[jax.ShapeDtypeStruct]:
    rows, length, width, vocabulary = shape
    tokens = [jax.ShapeDtypeStruct((rows, length), each) for each in (jnp.int32, jnp.float32)]
    return [
        jax.ShapeDtypeStruct((rows, length, width), dtype),
        jax.ShapeDtypeStruct((vocabulary, width), dtype),
        *tokens,
    ]


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--target", default="h100:1x1", help="see jdp.foresight.targets")
    options.add_argument("--rounds", type=int, default=8, metavar="N")
    options.add_argument("--chunk-mib", type=float, default=4, help="of logits, on this CPU")
    given = options.parse_args()
    on, found = target(given.target), dict[str, Any]()
    forms = {"in chunks": functools.partial(in_chunks, CHUNK_BYTES), "whole": whole}
    for name, shape in ON_GPU.items():
        programs = {
            words: compile_step(lowered(form, operands(shape, jnp.bfloat16), on.devices[0]))
            for words, form in forms.items()
        }
        found[name] = {words: foreseen(one, on) for words, one in programs.items()}
        if not given.json:
            for words, one in found[name].items():
                numbers = f"{one['temp_mib']:8.0f} MiB held, {one['traffic_mib']:8.0f} MiB moved, {one['us']:7.0f} us"
                print(f"{on} {name:12} {words:10} {numbers}", flush=True)
    forms["in chunks"] = functools.partial(in_chunks, int(given.chunk_mib * MIB))
    for name, shape in ON_CPU.items():
        found[name] = on_this_cpu(forms, operands(shape, jnp.float32), given.rounds)
        if not given.json:
            temp = ", ".join(f"{words} {size:.1f} MiB" for words, size in found[name]["temp_mib"].items())
            print(f"cpu {name}: processor time {show(found[name]['cpu_ratio'])}; {temp}", flush=True)
    ratios = [
        [one["in chunks"][what] / one["whole"][what] for name, one in found.items() if name in ON_GPU]
        for what in ("us", "temp_mib")
    ]
    row = Row(
        f"the loss in chunks over whole logits ({on}: {', '.join(ON_GPU)}): simulated time; temporaries",
        "; ".join(", ".join(f"{each:.2f}" for each in some) for some in ratios),
    )
    finish({"target": str(on), "found": found}, given.json, row)


if __name__ == "__main__":
    main()
