"""A compiled step, from the compiler or the cache: the scheduled program as text, its memory, XLA's warnings.

One program compiles at a time, because XLA writes its warnings to the process' standard error: the lines that arrive
there meanwhile are about this program.
"""

import json
import os
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import jax

from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.core.compiling.persistent_cache import without_kept_programs
from jdp.foresight.program.collectives import Collective, collectives
from jdp.foresight.program.module import Program, parse
from jdp.foresight.targets.resolve import Target


class CompileError(UserError):
    """XLA could not compile a step."""


@dataclass(frozen=True)
class Compiled:
    """One compiled step. Sizes are bytes per device, from XLA's memory analysis."""

    text: str = field(repr=False)  # the scheduled program
    argument_bytes: int  # the step's inputs
    output_bytes: int  # its results
    alias_bytes: int  # results written into donated inputs
    temp_bytes: int  # temporaries while it runs
    code_bytes: int  # the program itself
    warnings: tuple[str, ...]  # XLA's lines about resharding and memory
    seconds: float  # time of compilation
    cached: bool = False  # read from the cache
    host_bytes: int = 0  # in host memory, for this device; not in the other sizes

    @cached_property
    def program(self) -> Program:
        return parse(self.text)

    @cached_property
    def collectives(self) -> list[Collective]:
        return collectives(self.program)

    @property
    def total_bytes(self) -> int:
        """Bytes that a device must hold: arguments, results not written into arguments, temporaries, code."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


def compile_step(
    lowered: jax.stages.Lowered,
    *,
    target: Target | None = None,
    options: Mapping[str, Any] | None = None,
    cache: Cache | None = None,
) -> Compiled:
    """Compile a step lowered for `target` with compiler `options`, or find the result in `cache`."""
    if cache is None:
        return _compile(lowered)
    devices, chosen = target.fingerprint if target else "", str(sorted((options or {}).items()))
    name = f"{_key(lowered, devices, chosen)}.json.z"
    if (stored := cache.load(name, _read_entry)) is not None:
        return stored
    compiled = _compile(lowered)
    content = zlib.compress(json.dumps(asdict(compiled)).encode(), level=1)
    cache.store(name, lambda file: file.write(content))
    return compiled


_VERSION = "4"  # of an entry's fields


def _key(lowered: jax.stages.Lowered, *described: str) -> str:
    """Return a hash of the program without its line numbers, of devices, versions and the user's source files in it."""
    located = lowered.as_text(debug_info=True)
    files = [Path(name) for name in sorted(set(re.findall(r'"([^"]+\.py)":\d', located)))]
    own = [file for file in files if file.is_file() and "site-packages" not in file.parts]
    sources = [Cache.key(str(file), file.read_text("utf-8", errors="replace")) for file in own]
    settings = (version("jax"), version("jaxlib"), _VERSION, os.environ.get("XLA_FLAGS", ""))
    return Cache.key(*settings, *described, lowered.as_text(), *sources)


def _read_entry(file: BinaryIO) -> Compiled:
    entry = json.loads(zlib.decompress(file.read()))
    if not isinstance(entry, dict) or set(entry) != {f.name for f in fields(Compiled)}:
        raise UserError("an entry of another version")
    values: dict[str, Any] = {**entry, "warnings": tuple(entry["warnings"]), "cached": True}
    return Compiled(**values)


def _compile(lowered: jax.stages.Lowered) -> Compiled:
    begin = time.perf_counter()
    with _LOCK, without_kept_programs(), _standard_error() as lines:
        try:
            compiled = _with_or_without_triton(lowered)
        except jax.errors.JaxRuntimeError as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            remedy = ""
            if "RESOURCE_EXHAUSTED" in first or "out of memory" in first.lower():
                remedy = (
                    ". Reduce the memory of a device: another strategy, more microbatches (accumulate), "
                    "rematerialisation, a smaller batch"
                )
            raise CompileError(f"XLA did not compile this step: {first}{remedy}") from error
    sizes: Any = compiled.memory_analysis()  # jaxlib's CompiledMemoryStats
    return Compiled(
        text=compiled.as_text() or "",
        argument_bytes=sizes.argument_size_in_bytes,
        output_bytes=sizes.output_size_in_bytes,
        alias_bytes=sizes.alias_size_in_bytes,
        temp_bytes=sizes.temp_size_in_bytes,
        code_bytes=sizes.generated_code_size_in_bytes,
        host_bytes=sizes.host_argument_size_in_bytes
        + sizes.host_temp_size_in_bytes
        + sizes.host_output_size_in_bytes
        - sizes.host_alias_size_in_bytes,
        warnings=tuple(lines),
        seconds=time.perf_counter() - begin,
    )


def _with_or_without_triton(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile; if XLA finds no tiles for a product, as it has no device to try them on, compile for cuBLAS' kernels."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "output tile sizes" not in str(error):
            raise
        notice("XLA found no tiles for a matrix product without a GPU to try them on: compiled for cuBLAS instead")
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


_LOCK = threading.Lock()
_KEPT = re.compile(r"rematerializ|[Rr]esharding|spmd|SPMD|memory use below|exceeds the base limit|donat")


@contextmanager
def _standard_error() -> Generator[list[str]]:
    """Collect lines about sharding and memory on file descriptor 2, also from C++; pass on the rest."""
    lines = list[str]()
    try:
        sys.stderr.flush()
        original = os.dup(2)
    except (OSError, ValueError):  # there is no standard error
        yield lines
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if _KEPT.search(line):
                    lines.append(line)
                else:
                    print(line, file=sys.stderr)
