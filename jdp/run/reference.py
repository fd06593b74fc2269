"""The reference of preference learning: log-probabilities of every answer under the weights that a run starts from.

They are computed once, before the first step, by all devices, and kept in the run's folder, `reference.npz`. A second
copy of the weights would take their memory on every device, and a forward pass at every step. With LoRA they are those
of the model without updates.

The file has the samples' fingerprints and a checksum of the weights. Values of other samples or weights are not used.
A run's fingerprint covers the values themselves, so a resume with others is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from jdp.base.formatting import format_seconds
from jdp.core.cluster.barrier import from_first_process
from jdp.core.sharding.host_memory import on_device
from jdp.core.state import TrainState, own_shaped
from jdp.data.text.preference_samples import PreferenceSamples
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.run.folder import REFERENCE

_WEIGHTS = "weights"

Sides = dict[str, PreferenceSamples]


@dataclass
class Reference:
    """The values of a run, and those that are not there yet.

    Attributes:
        assembly: of the run; its samples get the values.
        file: that keeps them.
        weights: the checksum of the weights that they are of; "": there are none.
        values: a side's fingerprint -> float32 [samples, 2].
    """

    assembly: Assembly
    file: Path
    weights: str
    values: dict[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])

    @staticmethod
    def of(assembly: Assembly, folder: Path) -> Reference | None:
        """Return what the folder keeps; None for an experiment that learns no preferences. All processes call it."""
        if not assembly.learns_preferences:
            return None
        found = Reference(assembly, folder / REFERENCE, "")
        kept = found._read() if jax.process_index() == 0 else {}
        told = json.loads(from_first_process("the reference that is kept", json.dumps([*kept])))
        if told:
            found.weights = from_first_process("the weights of the reference", bytes(kept.get(_WEIGHTS, b"")).decode())
        for key, side in sorted(_sides(assembly).items()):
            if key in told:
                found._set(side, _from_first(kept.get(key, np.zeros((len(side), 2), np.float32))))
        return found

    @property
    def is_complete(self) -> bool:
        """Whether every sample has its values."""
        return _sides(self.assembly).keys() <= self.values.keys()

    def fingerprint(self, data: str) -> str:
        """Return 16 hex digits of the data's fingerprint and of the values of its samples."""
        digest = hashlib.blake2b(data.encode(), digest_size=8)
        for side in _in(self.assembly.data):
            digest.update(side.reference.tobytes())
        return digest.hexdigest()

    def compute(self, state: TrainState, *, resumes: bool, beat: Callable[[], None]) -> str | None:
        """Compute what is not there yet, with the initial weights, and keep it; return a line about it.

        Args:
            state: has the initial weights.
            resumes: whether values of these weights must be there already.
            beat: called after each batch.
        """
        weights = checksum(state)
        if weights != self.weights:
            if resumes and self.weights:
                raise ExperimentError(
                    f"train.init_from must lead to the weights that the run started from; given others than "
                    f"{self.file} is of, and further pairs to evaluate: restore the weights, or remove [eval.NAME]"
                )
            self.values.clear()
        self.weights = weights
        missing = {key: side for key, side in _sides(self.assembly).items() if key not in self.values}
        if not missing:
            return None
        start = time.perf_counter()
        for _, side in sorted(missing.items()):
            self._set(side, self._of_side(state, side, beat))
        if jax.process_index() == 0:
            self._write()
        pairs, seconds = sum(map(len, missing.values())), time.perf_counter() - start
        return f"reference: log-probabilities of {pairs:,} pairs in {format_seconds(seconds)}, kept in {self.file.name}"

    def _of_side(self, state: TrainState, side: PreferenceSamples, beat: Callable[[], None]) -> NDArray[np.float32]:
        rows = self.assembly.eval_batch_size
        values = np.zeros((-(-len(side) // rows), rows, 2), np.float32)
        with self.assembly.feed(side, seed=0, shuffle=False, epochs=1, numbered=True) as batches:
            for number, batch in enumerate(batches):
                values[number] = jax.device_get(self.assembly.reference_step(state, batch)["logps"])
                beat()
        found = values.reshape(-1, 2)[: len(side)]
        if wrong := int((~np.isfinite(found)).any(axis=1).sum()):
            raise ExperimentError(
                f"the initial weights must give every answer a finite log-probability; given {wrong} of {len(side):,} "
                "pairs without: look at train.init_from"
            )
        return found

    def _set(self, side: PreferenceSamples, values: NDArray[np.float32]) -> None:
        side.reference = self.values[side.fingerprint] = values
        for other in _in_assembly(self.assembly):
            if other.fingerprint == side.fingerprint:
                other.reference = values

    def _read(self) -> dict[str, NDArray[Any]]:
        """Return what the file has; nothing if it is not there, or damaged."""
        try:
            with np.load(self.file) as arrays:
                return dict(arrays)
        except Exception:  # a damaged file makes NumPy and zipfile raise nearly anything; the values are made anew
            return {}

    def _write(self) -> None:
        written = self.file.with_name(f"{REFERENCE}.new")
        with written.open("wb") as opened:
            arrays: dict[str, Any] = {_WEIGHTS: np.frombuffer(self.weights.encode(), np.uint8), **self.values}
            np.savez(opened, **arrays)
            opened.flush()
            os.fsync(opened.fileno())
        written.replace(self.file)


def checksum(state: TrainState) -> str:
    """Return 32 hex digits of a state's parameters, whatever they are sharded over."""

    def of_all(params: Any) -> jax.Array:
        own = own_shaped(on_device(params), "params", state.static)
        return jnp.stack([_of_leaf(leaf) for leaf in jax.tree.leaves(own)])

    replicated = state.step.sharding
    values = np.asarray(jax.device_get(jax.jit(of_all, out_shardings=replicated)(state.params)))
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


def _of_leaf(leaf: jax.Array) -> jax.Array:
    """Return a sum, modulo 2³², of all bits, each number mixed with its place: the order of adding is no matter."""
    bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    place = jnp.uint32(1)
    for axis, size in enumerate(leaf.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    mixed = (bits ^ (place * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA6B)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


def _sides(assembly: Assembly) -> Sides:
    return {side.fingerprint: side for side in _in_assembly(assembly)}


def _in_assembly(assembly: Assembly) -> Iterator[PreferenceSamples]:
    yield from _in(assembly.data)
    for source in assembly.eval_sets.values():
        yield from _in(source)


def _in(data: Any) -> Iterator[PreferenceSamples]:
    """Yield the pairs in a data set, a mixture or a source of evaluation."""
    if isinstance(data, PreferenceSamples):
        yield data
    elif parts := getattr(data, "parts", None) or getattr(data, "sources", None):
        for part in parts:
            yield from _in(part)
    else:
        yield from (data.train, data.heldout)


def _from_first(values: NDArray[np.float32]) -> NDArray[np.float32]:
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.broadcast_one_to_all(values))
