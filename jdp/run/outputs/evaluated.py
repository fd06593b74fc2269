"""Files of an evaluation, evaluations/STEP/SET-KIND: the loss of each document of text, or which classes are confused.

An evaluation step returns values of every row of the global batch to every process. So all processes add up the same
numbers, and process 0 writes. A step that is evaluated again writes the same files.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp.data import Source
from jdp.data.text.by_document import DocumentSums
from jdp.experiment.assembly import Assembly
from jdp.experiment.losses import COUNTED, LABELS, NATS, PREDICTED
from jdp.run.outputs.metrics import json_safe

EVALUATIONS = "evaluations"
DOCUMENTS, CONFUSION = "documents.jsonl", "confusion.json"


class SingleExamples(ABC):
    """What an evaluation adds up of single examples.

    Attributes:
        file: name of the file that it becomes.
        names: metrics of the step that hold values of single examples.
    """

    file: str
    names: tuple[str, ...]

    @staticmethod
    def of(assembly: Assembly, name: str, source: Source) -> SingleExamples | None:
        """Return what [evaluate] asks for of the data set `name`; None: nothing."""
        asked = assembly.experiment.evaluate
        if asked.documents:
            return Documents(name, source, assembly)
        return Confusion(name, assembly.data.classes) if asked.confusion else None

    def taken(self, measured: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Add the values of a batch, and return the other metrics."""
        self.add({name: np.asarray(jax.device_get(measured[name])) for name in self.names})
        return {name: value for name, value in measured.items() if name not in self.names}

    @abstractmethod
    def add(self, values: Mapping[str, Any]) -> None:
        """Add the values of a batch."""

    @abstractmethod
    def text(self) -> str:
        """Return the contents of the file."""


class Documents(SingleExamples):
    """The loss of each document of text."""

    names = (NATS,)

    def __init__(self, name: str, source: Source, assembly: Assembly) -> None:
        self.file, self._read = f"{name}-{DOCUMENTS}", 0
        self._sums = DocumentSums(source, assembly.data.tokenizer)

    def add(self, values: Mapping[str, Any]) -> None:
        self._sums.add(self._read, values[NATS])
        self._read += len(values[NATS])

    def text(self) -> str:
        return "".join(json.dumps(json_safe(row), ensure_ascii=False) + "\n" for row in self._sums.rows())


class Confusion(SingleExamples):
    """How often each class was taken for each: whole numbers of examples whose weight is not 0."""

    names = (PREDICTED, LABELS, COUNTED)

    def __init__(self, name: str, classes: tuple[str, ...]) -> None:
        self.file, self._classes = f"{name}-{CONFUSION}", classes
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        there = values[COUNTED] > 0
        pairs = np.stack([values[LABELS][there], values[PREDICTED][there]], axis=1).astype(np.int64)
        for (label, predicted), count in zip(*np.unique(pairs, axis=0, return_counts=True), strict=True):
            key = int(label), int(predicted)
            self._counts[key] = self._counts.get(key, 0) + int(count)

    def text(self) -> str:
        counts = [[*pair, count] for pair, count in sorted(self._counts.items())]
        return json.dumps({"classes": self._classes, "counts": counts}, ensure_ascii=False) + "\n"


def write(folder: Path, step: int, files: Mapping[str, str]) -> None:
    """Write the files of an evaluation into a run's folder, each completely or not at all; process 0 only."""
    if not files or jax.process_index() != 0:
        return
    place = folder / EVALUATIONS / str(step)
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        fresh = place / f"{name}.new"
        fresh.write_text(text, "utf-8")
        fresh.replace(place / name)
