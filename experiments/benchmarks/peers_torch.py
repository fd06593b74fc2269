"""The PyTorch contenders of `peers.py`: the quickstart's model, batch and optimizer, as PyTorch's users write them.

    echo 20 | RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500 python peers_torch.py eager

Modes: `products` multiplies matrices in one process; `eager` and `compiled` run under DistributedDataParallel; `fsdp2`
and `fsdp2-compiled` shard by layer (`fully_shard`). There is one process per core with one thread, connected by Gloo,
and AdamW is fused. With MEMORY=kept the process keeps its freed memory, as in jdp (`jdp/base/machine.py`).
"""

import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import serve

WORDS, LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN = 256, 4, 128, 4, 2, 384
ROWS, LENGTH = 16, 128
HEAD = WIDTH // HEADS


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], -1, HEAD).transpose(1, 2)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        angles = torch.arange(LENGTH)[:, None] * 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if writes else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).view(-1, WORDS), targets.view(-1))


def distributed(model: GPT, mode: str) -> nn.Module:
    """Return the model, distributed as the mode requires."""
    if mode.startswith("fsdp2"):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return torch.compile(model) if mode == "fsdp2-compiled" else model  # pyright: ignore[reportReturnType]
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch.compile(wrapped) if mode == "compiled" else wrapped  # pyright: ignore[reportReturnType]


def products() -> float:
    """Multiply two matrices of 1024 × 1024."""
    x = torch.ones(1024, 1024)
    return (x @ x)[0, 0].item()


def main() -> None:
    if sys.argv[1] == "products":
        torch.set_num_threads(1)
        serve(products)
        return
    if os.environ.get("MEMORY") == "kept":
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from jdp.base.machine import keep_memory

        assert keep_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT()
    assert sum(parameter.numel() for parameter in model.parameters()) == 820_352
    run = distributed(model, sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    rows = ROWS // dist.get_world_size()
    tokens, targets = torch.randint(0, WORDS, (2, rows, LENGTH))

    def step() -> float:
        loss = run(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    serve(step)


if __name__ == "__main__":
    main()
