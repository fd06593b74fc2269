"""How fast data become global batches: tokens and images a second, by length and source.

    python experiments/benchmarks/input.py [--seconds 2] [--lengths 128,1024,8192] [--json]

Text is the Python standard library's source, as bytes, joined end to end ("stream") or whole documents packed into rows
("documents"). Images are 50,000 of 32 x 32 x 3 in memory, as they are and shifted and mirrored (`crop_padding`,
`flip`). All go the way of a run: the global shuffle, batches of 64 rows, `jdp.shard_batches` onto one CPU device. The
clock is the processor time of all threads, which other programs do not touch; a run reads ahead in threads of its own.

A GPU that trains GPT-2 124M takes some 400,000 tokens/s (`gpt_torch.py`), so eight of them 3.2 million.

Measured 2026-11-22 on 2 x86 cores shared with other programs (load 11), jax 0.10.2, a processor second: 4.4, 37.5 and
102 million tokens of stream at lengths of 128, 1024 and 8192, 3.9, 27 and 90 of packed documents; 44,000 images as they
are, 21,000 shifted and mirrored.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from measure import Row, finish, parser

import jdp
from jdp.data import array_data, augmented, global_batches, text_data

ROWS = 64


def rate(source: Any, seconds: float) -> float:
    """Samples a processor second, as global batches."""
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1], data=1))
    with jdp.shard_batches(global_batches(source, batch_size=ROWS, seed=0), plan) as feed:
        jax.block_until_ready(list(itertools.islice(feed, 5)))  # threads are up, files are read
        begun, cpu, count = time.monotonic(), time.process_time(), 0
        while time.monotonic() - begun < seconds:
            jax.block_until_ready(next(feed))
            count += ROWS
        return count / (time.process_time() - cpu)


def sources(lengths: list[int]) -> Iterator[tuple[str, Any, int]]:
    """(name, samples, tokens in a sample or 0)."""
    for packing, length in itertools.product(("stream", "documents"), lengths):
        yield f"{packing} of {length}", text_data(length=length, packing=packing).train, length
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (50_000, 32, 32, 3), np.uint8)
    arrays = {"images": pixels, "labels": random.integers(0, 10, len(pixels), np.int32)}
    images = array_data(arrays).train
    yield "images 32 x 32", images, 0
    yield "the same, shifted and mirrored", augmented(images, crop_padding=4, flip=True, seed=0), 0


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--seconds", type=float, default=2.0, metavar="S", help="for each source")
    options.add_argument("--lengths", default="128,1024,8192", metavar="N,…")
    given = options.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    found: dict[str, float] = {}
    for name, source, length in sources([int(text) for text in given.lengths.split(",")]):
        found[name] = rate(source, given.seconds) * (length or 1)
        if not given.json:
            print(f"{name:32} {found[name]:14,.0f} {'tokens' if length else 'images'} a processor second", flush=True)
    text = ", ".join(f"{rate / 1e6:.1f} ({name})" for name, rate in found.items() if "of" in name)
    images = ", ".join(f"{rate:,.0f}" for name, rate in found.items() if "of" not in name)
    measures = "data as global batches, a processor second: million tokens by length; images of 32 x 32, as they are "
    finish({"rates": found}, given.json, Row(f"{measures}and augmented", f"{text}; {images}"))


if __name__ == "__main__":
    main()
