"""Gradients of a loss over devices and microbatches: one algorithm (`accumulate`), two views (`auto`, `manual`)."""
