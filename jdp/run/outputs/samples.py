"""The text that a run's model writes, [sample]: a row for each prompt, in the files samples/STEP.jsonl.

The model stays sharded by the plan: one program, with a cache of keys and values, runs on all devices, and XLA places
the collectives. Draws depend only on the run's seed, so sampling a step again gives the same text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jdp.core.sharding.traced_mesh import tracing_on
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.models import generate
from jdp.models.decode import Draw, continued
from jdp.run.outputs.metrics import SAMPLES, replace_file


def write(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the texts of a step into a run's folder, completely or not at all; process 0 only."""
    if not rows or jax.process_index() != 0:
        return
    (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_file(folder / SAMPLES / f"{step}.jsonl", text)


class Writer:
    """Writes the text of [sample]; its program is compiled once."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def rows(self, state: TrainState, step: int) -> list[dict[str, Any]]:
        """Return a row for each prompt: step, prompt, and the text, which begins with the prompt.

        It uses the averaged parameters if the run has them. Tokens unknown to the tokenizer are left out.
        """
        if self._assembly.experiment.sample is None:
            return []
        rows, data = list[dict[str, Any]](), self._assembly.inputs.data
        state = self._assembly.training.averaged(state)
        for prompt, tokens in self._prompts.items():
            drawn = np.asarray(jax.device_get(self._continue(state, *tokens)))[0]
            shown = np.concatenate([data.tokenizer.encode(prompt), drawn])  # without the token that opens a text
            rows.append({"step": step, "prompt": prompt, "text": data.tokenizer.decode(shown[shown < data.vocab_size])})
        return rows

    @functools.cached_property
    def _prompts(self) -> dict[str, tuple[NDArray[np.int32], np.int32]]:
        """Each prompt's tokens [1, n], padded to one length if they and the text fit into the context; and the end."""
        table, tokenizer = self._assembly.experiment.sample, self._assembly.inputs.data.tokenizer
        assert table is not None
        tokens = {text: tokenizer.opened(tokenizer.encode(text)) for text in table.prompts}
        longest = max(map(len, tokens.values()))
        self._fits = longest + table.length <= self._assembly.training.config.context
        padded = {text: np.pad(row, (0, (longest - len(row)) * self._fits)) for text, row in tokens.items()}
        return {text: (padded[text][None], np.int32(len(row) - 1)) for text, row in tokens.items()}

    @functools.cached_property
    def _continue(self) -> Callable[[TrainState, NDArray[np.int32], np.int32], jax.Array]:
        """The function that continues a prompt: `table.length` tokens, [1, length]."""
        training, table, fits = self._assembly.training, self._assembly.experiment.sample, self._fits
        assert table is not None
        rng = jax.random.fold_in(training.rng, 2)  # 0 and 1 are the weights' and the steps'

        @functools.partial(jax.jit, out_shardings=training.plan.replicated)
        def continue_prompt(state: TrainState, tokens: jax.Array, end: jax.Array) -> jax.Array:
            with tracing_on(training.mesh):
                if fits:
                    return continued(state.model, tokens, end, rng, length=table.length, draw=Draw())
                return generate(state.model, tokens, length=table.length, rng=rng)[:, tokens.shape[1] :]

        return continue_prompt
