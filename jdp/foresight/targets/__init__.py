"""Devices to compile for: `resolve.py` makes them from words like "h100:8x8", `relocate.py` moves a step onto them."""

from jdp.foresight.targets.resolve import Target, target

__all__ = ["Target", "target"]
