"""The cross-entropy of next tokens and its gradients from features: in chunks, beside whole float32 logits.

    python experiments/benchmarks/loss.py [--target h100:1x1] [--rounds 8] [--json]

bf16 features and head for a GPU (described, compiled, not run: bytes of temporaries and of memory traffic, and
simulated time), fp32 on this CPU (processor time in turns, and temporaries), where chunks are those of `--chunk-mib`
for comparison: by itself jdp computes logits of up to 512 MiB whole there.

2026-11-22 (jax 0.10.2; 2 cores, load 12; loss and both gradients, tied):

| | in chunks: held, moved, time | whole |
|---|---|---|
| gpt2-124m, 8 × 1024, 50,257 of 768, H100 | 0.81 GiB, 9.4 GiB, 5.1 ms | 1.5 GiB, 11.0 GiB, 5.7 ms |
| gpt-1b, 4 × 2048, 50,304 of 2048, H100 | 0.81 GiB, 12.9 GiB, 10.9 ms | 1.5 GiB, 11.4 GiB, 11.2 ms |
| llama-8b, 1 × 8192, 128,256 of 4096, H100 | 2.2 GiB, 70 GiB, 51.3 ms | 3.9 GiB, 31 GiB, 51.0 ms |
| 256 × 50,304 of 128, CPU, chunks of 4 MiB | 29 MiB, processor time 1.22 ± 0.07 | 98 MiB, 1 |

What is moved more is the head's float32 gradient, read and written for each chunk, while products are computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from attention import MIB, foreseen, measured, options
from measure import Row, finish

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
    parser = options(__file__, __doc__)
    parser.add_argument("--chunk-mib", type=float, default=4, help="of logits, on this CPU")
    given = parser.parse_args()
    on = target(given.target)
    forms = {"in chunks": functools.partial(in_chunks, CHUNK_BYTES), "whole": whole}
    gpu = foreseen(ON_GPU, forms, operands, on, quiet=given.json)
    forms["in chunks"] = functools.partial(in_chunks, int(given.chunk_mib * MIB))
    cpu = measured(ON_CPU, forms, operands, given.rounds, quiet=given.json)
    ratios = [
        ", ".join(f"{one['in chunks'][what] / one['whole'][what]:.2f}" for one in gpu.values())
        for what in ("us", "temp_mib")
    ]
    measures = f"the loss in chunks over whole logits ({on}: {', '.join(gpu)}): simulated time; temporaries"
    finish({"target": str(on), "found": gpu | cpu}, given.json, Row(measures, "; ".join(ratios)))


if __name__ == "__main__":
    main()
