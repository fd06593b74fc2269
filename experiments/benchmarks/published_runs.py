"""Training runs that others published with their settings, with which `published.py` compares the time model.

A run is listed if jdp's step can do the same work: equal model, tokens, sharding, microbatches and rematerialisation,
in bf16 with float32 master weights, on GPUs whose rates are known. `EXCLUDED` has runs that were excluded before any
fit, with the reasons. Constants are fitted on the runs marked `fitted`: of MPT on one host, every model size once for
each GPU. All others are held out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from jdp.models import GPTConfig

SOURCES = {
    "mpt": "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md (061f2c7)",
    "torchtitan": "github.com/pytorch/torchtitan docs/performance.md (0413364)",
    "maxtext": "github.com/AI-Hypercomputer/maxtext MaxText/configs/a3/llama_2_7b (d2aa7f2)",
    "fms": "github.com/foundation-model-stack/fms-fsdp README.md, as of its two columns A100 and H100",
    "kempner": "github.com/KempnerInstitute/KempnerForge benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md (9f3f03a)",
    "jdp": "experiments/LOG.md, GPT-2 124M against PyTorch on one H100",
}
EXCLUDED = {
    "torchtitan Llama 3.1 8B on 8 and 128 H100": "their H100s have HBM2e at 2.4 TB/s and a power limit of 500 W",
    "torchtitan, NeMo, Megatron with tensor, context or pipeline parallelism": "jdp shards over data alone there",
    "MPT in fp8; torchtitan and NeMo in fp8": "jdp's step has no fp8 products",
    "MPT at lengths of 16k and more": "their attention was Triton's of 2023, which is slower than cuDNN's at long rows",
    "MPT on A100 40GB": "another card, at 1.6 TB/s; the same settings are published for 80GB",
    "torchtitan and fms-fsdp with selective checkpointing of every second layer or of single operations": (
        "jdp recomputes all layers or none"
    ),
    "MaxText on 2 to 16 A3 hosts": "their all-reduce between hosts went over TCP, whose rate is not published",
    "Pax (JAX-Toolbox), HF smol": "the page with settings and numbers was not found again",
    "nanoGPT 124M on 8 A100 (issue 110)": (
        "excluded only after its ratio was 1.53: it is of 2023-02-02, a day before its author reported a padded "
        "vocabulary, a quarter faster (50257 columns are not aligned for tensor cores, which the time model ignores)"
    ),
}


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        name: model, GPUs, rows x length of a microbatch on one GPU.
        config: the model, unrolled, with cuDNN's attention.
        target: as for `jdp plan`.
        rows, length: of a microbatch on one GPU.
        accumulate: microbatches per step.
        tokens_per_second: of one GPU, as published.
        source: key of `SOURCES`.
        strategy, replicas: replicas are hosts, under HSDP.
        fitted: whether the constants are fitted on it.
        chip: fields of `Gpu` that differ from the target's GPU.
        reduce: dtype in which gradients are summed over GPUs.
    """

    name: str
    config: GPTConfig
    target: str
    rows: int
    length: int
    accumulate: int
    tokens_per_second: float
    source: str
    strategy: str = "zero3"
    replicas: int = 1
    fitted: bool = False
    chip: Mapping[str, float] = field(default_factory=dict, hash=False)
    reduce: str = "fp32"

    @property
    def eager(self) -> bool:
        """Whether it ran in PyTorch without a compiler, which would fuse element-wise operations."""
        return self.source in ("mpt", "torchtitan", "fms")

    @property
    def ampere_attention(self) -> bool:
        """Whether it ran on Hopper with attention kernels for Ampere: FlashAttention-2, or Triton's of 2023."""
        return self.source in ("mpt", "fms") and self.target.startswith("h100")


def _gpt(width: int, heads: int, layers: int) -> GPTConfig:
    """Return MPT's shape: learned positions, layer norms and maps without bias, gelu, tied."""
    base = GPTConfig(vocab_size=50_368, context=2048, layers=layers, width=width, heads=heads, positions="learned")
    return replace(base, activation="gelu", norm="layer", tied=True, scan=False, attention="cudnn")


def _llama(width: int, heads: int, layers: int, mlp: int, vocabulary: int, kv_heads: int | None = None) -> GPTConfig:
    config = GPTConfig(vocab_size=vocabulary, context=8192, layers=layers, width=width, heads=heads, kv_heads=kv_heads)
    return replace(config, mlp_width=mlp, rope_theta=500_000.0, scan=False, attention="cudnn")


# llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml.
MPT = {
    "125m": _gpt(768, 12, 12),
    "350m": _gpt(1024, 16, 24),
    "760m": _gpt(1536, 12, 24),
    "1b": _gpt(2048, 16, 24),
    "3b": _gpt(2560, 20, 32),
    "7b": _gpt(4096, 32, 32),
    "13b": _gpt(5120, 40, 40),
    "30b": _gpt(7168, 56, 48),
    "70b": _gpt(8192, 64, 80),
}
LLAMA = {
    "2 7B": _llama(4096, 32, 32, 11_008, 32_000),
    "2 13B": _llama(5120, 40, 40, 13_824, 32_000),
    "3 8B": _llama(4096, 32, 32, 14_336, 128_256, 8),
    "3 70B": _llama(8192, 64, 80, 28_672, 128_256, 8),
    "3 13B (Kempner)": _llama(5120, 40, 40, 17_920, 128_256, 8),
}
# size, length, GPUs, rows, microbatches, whether recomputed, tokens/s a GPU, fitted
_MPT_H100 = """
760m  2048  8  24  2 - 63147 fit
1b    2048  8  14  1 - 45455 fit
1b    8192  8   3  4 - 29157
3b    1024  8  20  6 - 27046 fit
3b    4096  8   5  6 - 20964
3b    2048 64   6  3 - 22525
7b    2048  8   6  1 - 10643 fit
7b    4096  8  16  2 full 8611
7b    8192  8   8  2 full 6935
13b   2048  8   2  1 - 4792
13b   1024  8  40  3 full 5502 fit
30b   2048  8   3 21 full 2002 fit
30b   2048 32  14  3 full 2308
70b   2048 64   8  4 full 1039
"""
_MPT_A100 = """
125m  2048  8  32  2 - 141737
760m  2048  8  24  2 - 32434 fit
1b    2048  8  14  4 - 20513 fit
3b    4096  8   5  6 - 9457
7b    2048  8   6  2 - 4641 fit
7b    8192  8   8  2 full 3206
13b   4096  8  10  3 full 2060 fit
30b   2048  8   3 21 full 916
"""


def _mpt(kind: str, table: str) -> Iterator[Run]:
    for line in table.strip().splitlines():
        size, length, gpus, rows, accumulate, remat, tokens, *fitted = line.split()
        config = replace(MPT[size], context=int(length), remat="full" if remat == "full" else None)
        name = f"MPT {size}, {gpus} {kind.upper()}, {rows} x {length}"
        target = f"{kind}:{max(1, int(gpus) // 8)}x{min(8, int(gpus))}"
        at = (int(rows), int(length), int(accumulate), float(tokens))
        yield Run(name, config, target, *at, source="mpt", fitted=bool(fitted))


def _others() -> Iterator[Run]:
    full = {name: replace(config, remat="full") for name, config in LLAMA.items()}
    yield Run("Llama 2 13B, 64 A100, 2 x 4096", LLAMA["2 13B"], "a100:8x8", 2, 4096, 1, 2162, "torchtitan")
    yield Run("Llama 3 70B, 64 A100, 1 x 8192", full["3 70B"], "a100:8x8", 1, 8192, 1, 331, "torchtitan")
    # 492 TFLOP/s a GPU by MaxText's count: 6 x 6.607e9 weights and 12 x 32 x 4096 x 4096 of attention a token.
    maxtext = 492e12 / (6 * 6.607e9 + 12 * 32 * 4096 * 4096)
    yield Run("Llama 2 7B, 8 H100, 4 x 4096", LLAMA["2 7B"], "h100:1x8", 4, 4096, 1, maxtext, "maxtext")
    # 400 and 800 Gb/s a host; its policy `bfSixteen` reduces in bf16.
    slow, faster = {"network_bandwidth": 6.25e9}, {"network_bandwidth": 12.5e9}
    seven = LLAMA["2 7B"]
    yield Run(
        "Llama 2 7B, 128 A100, 2 x 4096",
        seven,
        "a100:16x8",
        2,
        4096,
        1,
        3700,
        "fms",
        replicas=16,
        chip=slow,
        reduce="bf16",
    )
    yield Run(
        "Llama 2 7B, 96 H100, 2 x 4096",
        seven,
        "h100:12x8",
        2,
        4096,
        1,
        7500,
        "fms",
        replicas=12,
        chip=faster,
        reduce="bf16",
    )
    eight = full["3 8B"]
    yield Run("Llama 3 8B, 1 H200, 2 x 4096", eight, "h200:1x1", 2, 4096, 4, 10_471, "kempner")
    yield Run("Llama 3 8B, 2 H200, 2 x 4096", eight, "h200:1x2", 2, 4096, 4, 18_728 / 2, "kempner")
    yield Run("Llama 3 8B, 4 H200, 4 x 4096", eight, "h200:1x4", 4, 4096, 2, 38_983 / 4, "kempner")
    larger = full["3 13B (Kempner)"]
    yield Run("Llama 3 13B, 8 H200 on 2 hosts, 4 x 4096", larger, "h200:2x4", 4, 4096, 4, 35_405 / 8, "kempner")
    gpt2 = replace(MPT["125m"], vocab_size=50_304, context=1024)
    with_bias = replace(gpt2, bias=True)
    for rows, tokens in ((8, 344e3), (32, 379e3)):
        name = f"GPT-2 124M, 1 H100, {rows} x 1024"
        yield Run(name, with_bias, "h100:1x1", rows, 1024, 1, tokens, "jdp", strategy="zero1", fitted=True)


RUNS = (*_mpt("h100", _MPT_H100), *_mpt("a100", _MPT_A100), *_others())
