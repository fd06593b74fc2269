"""A directory of checkpoints behind an address, such as s3://bucket/run, used as one on a disk. `held` has how."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from jdp.checkpoint.bucket_copies import Held, named, require_shared
from jdp.checkpoint.directory import Checkpoints

_T = TypeVar("_T")


class RemoteCheckpoints(Checkpoints):
    """A directory of checkpoints behind an address.

    Args:
        directory: the address, such as s3://bucket/run.
        options: those of `Checkpoints`.

    Attributes:
        before_commit: called on process 0 with the folder of a checkpoint before it counts behind the address.

    Raises:
        CheckpointError: as `Checkpoints` does; or what is behind the address cannot be reached.
    """

    def __init__(  # pyright: ignore[reportInconsistentConstructor]
        self, directory: str | Path, **options: Any
    ) -> None:
        with named():
            self._held = Held(directory)
        self._checked = self._began = False
        self._announced: list[int] = []
        self.before_commit: Callable[[Path], None] | None = None
        with named():
            super().__init__(self._held.folder, **options)
            self._follow()

    @property
    def steps(self) -> list[int]:
        """Return all steps, as of any directory; those of another process are looked for until this one saves."""
        if not self._began and jax.process_index() == 0:
            with named():
                self._held.look()
        return super().steps

    def save(self, *arguments: Any, **options: Any) -> None:
        """Save as `Checkpoints.save` does.

        Args:
            arguments, options: those of `Checkpoints.save`.

        Raises:
            CheckpointError: as there; or the processes do not see one scratch folder.
        """
        if not self._checked:
            self._checked = True
            require_shared(self._held.scratch, self._held.remote.address)
        with named():
            super().save(*arguments, **options)

    def restore(self, *arguments: Any, **options: Any) -> Any:
        """Read as `Checkpoints.restore` does.

        Args:
            arguments, options: those of `Checkpoints.restore`.
        """
        with named():
            return super().restore(*arguments, **options)

    def restore_params(self, *arguments: Any, **options: Any) -> Any:
        """Read as `Checkpoints.restore_params` does; all arrays are fetched.

        Args:
            arguments, options: those of `Checkpoints.restore_params`.
        """
        with named():
            return super().restore_params(*arguments, **options)

    def wait(self) -> None:
        """Return when everything saved so far is behind the address.

        Raises:
            CheckpointError: it could not be; raised once.
        """
        with named():
            super().wait()
            gone, self._announced = self._announced, []
            if jax.process_index() == 0:
                self._held.delete([str(step) for step in gone if not (self.directory / str(step)).exists()])

    def _mark_for_deletion(self, steps: Sequence[int]) -> None:
        super()._mark_for_deletion(steps)
        self._announced += steps

    @contextmanager
    def _save_errors(self) -> Generator[None]:
        """As of any directory; for a step that was not saved, no other is deleted."""
        try:
            with super()._save_errors():
                yield
        except BaseException:
            self._announced, self._began = [], False
            raise

    def _committed(self, folder: Path) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.before_commit is not None:
            self.before_commit(folder)
        self._held.send(folder)

    def _read(self, step: int | Literal["best"] | None, read: Callable[[Path, str], _T]) -> tuple[int, _T]:
        found = super()._read(step, lambda folder, fix: read(self._held.fetched(folder), fix))
        self._follow()
        return found

    def _prepare(self, step: int) -> None:
        if not self._began and jax.process_index() == 0:
            self._held.look()
            self._held.delete(self._held.unfinished)
        super()._prepare(step)
        self._follow()
        self._began = True

    def _follow(self) -> None:
        if jax.process_index() == 0:
            self._held.follow()


Checkpoints.at_addresses = RemoteCheckpoints
