"""The text that a run's model writes, [sample].

The model stays sharded by the plan: one program, with a cache of keys and values, runs on all devices, and XLA places
the collectives. Draws depend only on the run's seed, so sampling a step again gives the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jdp.core.sharding.traced_mesh import tracing_on
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.models import generate
from jdp.models.decode import Draw, continued

Row = dict[str, Any]


class Writer:
    """Writes the text of [sample]; its program is compiled once."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def rows(self, state: TrainState, step: int) -> list[Row]:
        """Return a row for each prompt: step, prompt, and the text, which begins with the prompt.

        It uses the averaged parameters if the run has them. Tokens unknown to the tokenizer are left out.
        """
        table = self._assembly.experiment.sample
        if table is None:
            return []
        state = self._assembly.averaged(state)
        return [{"step": step, "prompt": prompt, "text": self._text(state, prompt)} for prompt in table.prompts]

    def _text(self, state: TrainState, prompt: str) -> str:
        data, tokens = self._assembly.data, self._prompts[prompt]
        drawn = np.asarray(jax.device_get(self._write(state, tokens)))[0]
        shown = np.concatenate([data.tokenizer.encode(prompt), drawn])  # without the token that opens a text
        return data.tokenizer.decode(shown[shown < data.vocab_size])

    @functools.cached_property
    def _prompts(self) -> dict[str, NDArray[np.int32]]:
        table = self._assembly.experiment.sample
        assert table is not None
        tokenizer = self._assembly.data.tokenizer
        return {text: tokenizer.opened(tokenizer.encode(text)) for text in table.prompts}

    @functools.cached_property
    def _write(self) -> Callable[[TrainState, NDArray[np.int32]], jax.Array]:
        """Return the function that continues a prompt: `table.length` tokens, [1, length]."""
        assembly, table = self._assembly, self._assembly.experiment.sample
        assert table is not None
        context, longest = assembly.config.context, max(map(len, self._prompts.values()))
        rng = jax.random.fold_in(assembly.rng, 2)  # 0 and 1 are the weights' and the steps'
        replicated = assembly.plan.replicated

        @functools.partial(jax.jit, out_shardings=replicated)
        def cached(state: TrainState, tokens: jax.Array, end: jax.Array) -> jax.Array:
            with tracing_on(assembly.mesh):
                return continued(state.model, tokens, end, rng, length=table.length, draw=Draw())

        @functools.partial(jax.jit, out_shardings=replicated)
        def windowed(state: TrainState, tokens: jax.Array) -> jax.Array:
            with tracing_on(assembly.mesh):
                text = generate(state.model, tokens, length=table.length, rng=rng)
                return text[:, tokens.shape[1] :]

        def write(state: TrainState, prompt: NDArray[np.int32]) -> jax.Array:
            if longest + table.length > context:
                return windowed(state, prompt[None])
            return cached(state, np.pad(prompt, (0, longest - len(prompt)))[None], np.int32(len(prompt) - 1))

        return write
