"""Notice that a user's code asks for the size of a mesh axis, which leaves no operation in its program."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax._src.core import AxisEnv, trace_ctx  # nothing public tells that `axis_size` or `psum(1, ...)` was called

_JAX, _JDP = (str(Path(path).parent) for path in (jax.__file__, Path(__file__).parents[1]))


@contextmanager
def noting_axis_sizes() -> Generator[list[Any]]:
    """Yield the list of the axes whose sizes code outside of jdp asks for while the context lasts."""
    asked, before = list[Any](), trace_ctx.axis_env
    trace_ctx.set_axis_env(_noting(before, asked))
    try:
        yield asked
    finally:
        trace_ctx.set_axis_env(before)


class _Noting(AxisEnv):
    """An environment of axes that notes who asks for a size."""

    __slots__ = ("asked",)
    asked: list[Any]

    def axis_size(self, axis_name: Any) -> int:
        """Return the size of an axis."""
        if not _called_by_jdp():
            self.asked.append(axis_name)
        return super().axis_size(axis_name)

    def pop_pure(self, axis_name: Any) -> AxisEnv:
        """Return the environment without an axis."""
        return _noting(super().pop_pure(axis_name), self.asked)

    def extend_pure(self, name_size_pairs: Iterable[tuple[Any, int]]) -> AxisEnv:
        """Return the environment with more axes, as `jax.vmap` adds one."""
        return _noting(super().extend_pure(name_size_pairs), self.asked)


def _noting(env: AxisEnv, asked: list[Any]) -> _Noting:
    made = object.__new__(_Noting)
    for name in ("axis_sizes", "spmd_axis_names", "explicit_mesh_axis_names"):
        object.__setattr__(made, name, getattr(env, name))
    object.__setattr__(made, "asked", asked)
    return made


def _called_by_jdp() -> bool:
    """Return True if the innermost code outside of JAX is jdp's."""
    frame = inspect.currentframe()
    for _ in range(2):  # this function and its caller
        frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_JAX):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_JDP)
