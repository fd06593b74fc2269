"""A GPT in PyTorch as its community writes it (nanoGPT's form), with which `gpu.py` compares jdp's.

    python experiments/benchmarks/gpt_torch.py [--size gpt2-124m|gpt-1.3b|tiny] [--rows 8] [--eager] [--json]

It uses `torch.compile`, `scaled_dot_product_attention`, bf16 by autocast, fused AdamW, gradients clipped at 1, and a
vocabulary of 50,304. It runs on the first GPU, else on the CPU, and reports the median of five rounds of steps, after a
round that compiles. FLOPs are counted as in nanoGPT: 6 per parameter and token, and 12 · layers · width · length per
token for attention (Chowdhery et al. 2022, appendix B).

Measured on one H200 and one H100: `gpu.py` has the table. Eager on the H100 (PyTorch 2.11.0, 2026-11-22): 29.4 ms, 279k
tokens/s, MFU 24 %, 8.1 GiB.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    """Layers, width, heads, tokens per row, vocabulary, and steps per round."""

    layers: int
    width: int
    heads: int
    length: int
    words: int = 50304
    steps: int = 10


SIZES = {
    "gpt2-124m": Size(12, 768, 12, 1024),
    "gpt-1.3b": Size(24, 2048, 16, 2048),  # GPT-3 XL (arXiv:2005.14165, table 2.1), with 16 heads of 128
    "tiny": Size(2, 64, 2, 64, words=256, steps=2),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        shape = (*x.shape[:2], self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.length, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def measure(size: Size, rows: int, *, compiled: bool) -> dict[str, Any]:
    """Return the median step time, and the speed, FLOPs and memory of a step."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_of = torch.compile(model) if compiled else model
    tokens, targets = torch.randint(0, 256, (2, rows, size.length), device=device)

    def round_of_steps() -> float:
        begun = time.perf_counter()
        for _ in range(size.steps):
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for all of them
        return (time.perf_counter() - begun) / size.steps

    round_of_steps()  # compiles
    seconds = statistics.median(round_of_steps() for _ in range(5))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "torch": torch.__version__,
        "compiled": compiled,
        "rows": rows,
        "parameters": parameters,
        "step_ms": 1e3 * seconds,
        "tokens_per_second": rows * size.length / seconds,
        "flops": (6 * parameters + 12 * size.layers * size.width * size.length) * rows * size.length,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="gpt2-124m")
    parser.add_argument("--rows", type=int, default=8, help="sequences per step")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(SIZES[options.size], options.rows, compiled=not options.eager)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['step_ms']:.1f} ms a step, {found['tokens_per_second']:,.0f} tokens/s")


if __name__ == "__main__":
    main()
