"""GPT-2 124M in PyTorch as its community writes it (nanoGPT's form), on one GPU: what jdp's is compared with.

    python experiments/benchmarks/gpt2_torch.py [--rows 8] [--eager] [--json]

`torch.compile`, `scaled_dot_product_attention`, bf16 by autocast, fused AdamW, gradients clipped at 1; 1024 tokens a
row, 50,304 words. The median of five rounds of ten steps, after ten. FLOPs as nanoGPT counts them: 6 a
parameter and token, and 12 · layers · width · length a token for attention (Chowdhery et al. 2022, appendix B).

Measured 2026-11 on one H100 80GB HBM3 (PyTorch 2.11.0, CUDA 13.0, driver 580.159.04), with a rougher script of the
same steps (this one has not run since): 8 rows 20.6 ms a step, 397k tokens/s, MFU 34.6 %, 5.1 GiB; eager 29.4 ms,
279k, 24 %, 8.1 GiB; 32 rows 68.4 ms, 479k, 42 %, 15.1 GiB. jdp's forms beside it are in experiments/LOG.md; kernel by
kernel, with the compiled program, in `h100/gpt2_124m_FORM.json.gz` (each a JSON object: `kernels`, rows of [HLO
instruction, kernel, launches a step, microseconds a step]; `text`, the program; its bytes), read by `gzip.open`.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LENGTH, WORDS, LAYERS, WIDTH, HEADS = 1024, 50304, 12, 768, 12
PEAK = 989.4e12  # FLOP/s of an H100 SXM in bf16, NVIDIA's data sheet


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(WIDTH, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.norm = (
            nn.Embedding(WORDS, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).view(-1, WORDS), targets.view(-1))


def measure(rows: int, *, compiled: bool) -> dict[str, Any]:
    """Return the median step and what follows from it."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.cuda.reset_peak_memory_stats()
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_of = torch.compile(model) if compiled else model
    tokens, targets = torch.randint(0, 256, (2, rows, LENGTH), device="cuda")

    def round_of_steps() -> float:
        begun = time.perf_counter()
        for _ in range(10):
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / 10

    round_of_steps()  # compiles
    seconds = statistics.median(round_of_steps() for _ in range(5))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = (6 * parameters + 12 * LAYERS * WIDTH * LENGTH) * rows * LENGTH
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "compiled": compiled,
        "rows": rows,
        "step_ms": 1e3 * seconds,
        "tokens_per_second": rows * LENGTH / seconds,
        "mfu": flops / seconds / PEAK,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="sequences of 1024 tokens in a step")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and PyTorch sees none")
    found = measure(options.rows, compiled=not options.eager)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['step_ms']:.1f} ms a step, {found['tokens_per_second']:,.0f} tokens/s, MFU {found['mfu']:.1%}")


if __name__ == "__main__":
    main()
