"""Keep XLA's compiled programs on disk: a process that starts the same program again compiles nothing.

JAX decides which programs are the same: by the program, versions, XLA's flags, the compiler's options and the devices.
It asks a store for the bytes (its persistent compilation cache). The store here is jdp's disk cache, in place of JAX's
own files:

- An entry is written completely or not at all, and has a digest: a damaged one is compiled again and replaced. JAX
  warns of its own damaged files at every start, and runs machine code with a flipped bit.
- An entry's name has the processor's features: a folder may be shared by machines with others.
- The least recently used entries are deleted beyond a limit, without a lock and without a further package.

JAX has the first process of a cluster write, for all, and the others read its programs. On CPU devices its names of
programs differ from process to process; here they are the same. There a step is compiled by the first process alone,
for which the others wait (`compile_once`). On GPUs all compile at the first start: XLA divides the search for the best
kernels among them, and one that compiles alone would wait for ever.
"""

import contextlib
import hashlib
import os
import platform
import secrets
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax._src import cache_key, compilation_cache  # nothing public takes another store
from jax.sharding import Mesh

from jdp.base.disk_cache import Cache, default_folder, make_folder, others_may_write, why_not_kept
from jdp.base.notices import notice, warn
from jdp.base.numbers import is_integer
from jdp.base.user_path import user_path
from jdp.core.cluster.agreement import processes_of
from jdp.core.cluster.barrier import from_every_process, from_first_process, meet
from jdp.core.cluster.service import joined_as

LIMIT_BYTES = 2**30
"""Of all kept programs together: some thousand of small models, some dozens of large ones."""
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.05,  # reading a program takes a tenth of that
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # XLA's own caches have no limit
}
"""JAX's settings, unless the environment has them already."""
_DIGEST_BYTES = 16
_COMPILE_SECONDS = 3600.0  # how long the other processes wait for a program
_shared_with_all: list[Path] = []
"""The folder, once `keep_programs` has found that all processes reach it."""
_SWITCH = threading.Lock()
_wanted: list[bool] = []
"""The setting that each context that has it off now found: the first one's is the user's."""


def kept_in() -> Path | None:
    """Return the folder in which compiled programs are kept, by jdp or by JAX itself; None: they are not."""
    wanted: bool = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    chosen: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Path(chosen) if wanted and chosen else None


def keep_programs(folder: str | Path | None = None, *, limit_bytes: int = LIMIT_BYTES) -> Path | None:
    """Keep compiled programs on disk from now on, and read those that are there: a second start compiles nothing.

        >>> folder = jdp.keep_programs("programs")  # before anything is compiled

    `jdp train` and `jdp launch` do so. Call it once, after `jdp.initialize()`, before anything is compiled, the same on
    every process. Anyone who can write to the folder can have this process run code: it is made for you alone. A
    folder that its group or all users may write to is not used.

    Args:
        folder: a folder for the programs; None: `programs` in $JDP_CACHE_DIR, else in ~/.cache/jdp. Give one when the
            home directory is small, slow or not shared. Several processes may share it, and those of one run must.
        limit_bytes: the least recently used programs are deleted beyond it. Raise it when large models fill the folder.

    Returns:
        The folder. A folder that JAX was told before stays, by a call or by JAX_COMPILATION_CACHE_DIR; this is reported
        if it is another one than given. None if JAX_ENABLE_COMPILATION_CACHE is off. None also if the folder cannot be
        made or reached by all processes of this run, or others may write to it, and this is reported.

    Raises:
        ValueError: a path that the file system cannot have, or a limit that is no positive integer.
    """
    if not is_integer(limit_bytes) or limit_bytes < 1:
        raise ValueError(
            f"limit_bytes is a number of bytes, at least 1; given {limit_bytes!r}: give an integer, such as 2**30."
        )
    own = (default_folder() / "programs" if folder is None else user_path(folder)).absolute()
    wanted: bool = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    elsewhere = kept_in()
    others = others_may_write(own)
    shared = _shared(own if wanted and not elsewhere and not others else None)
    if not wanted or elsewhere:
        if folder is not None and elsewhere and elsewhere.absolute() != own:
            notice(f"compiled programs are kept in {elsewhere}, as JAX was told before, and not in {own}")
        return elsewhere
    if others:
        warn(f"compiled programs are not kept for the next start, as others could put code among them: {others}")
        return None
    if not shared:
        notice(
            f"compiled programs are not kept for the next start: not all processes of this run reach {own}; set "
            "JDP_CACHE_DIR to a folder that all of them share"
        )
        return None
    try:
        make_folder(own, 0o700)
    except OSError as error:
        notice(why_not_kept("compiled programs", own, error))
        return None
    store = _Programs(Cache(own, limit_bytes, names=r"[0-9a-f]{64}\.xla", contents="compiled programs"))
    compilation_cache.get_file_cache = lambda path: (store, path)
    cache_key._hash_accelerator_config = _hash_devices  # pyright: ignore[reportPrivateUsage]
    for name, value in {**SETTINGS, "jax_compilation_cache_dir": str(own)}.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    _shared_with_all[:] = [own]
    return own


def compile_once(lowered: jax.stages.Lowered, mesh: Mesh) -> None:
    """Have the first process compile a program on CPU devices for all; the others wait, and read it.

    A process that does not find it compiles it. Nothing is done unless all processes keep programs in one folder, and
    run on the same kind of processor.

    Args:
        lowered: the program, the same on all processes of the mesh. All of them call this.
        mesh: the mesh of the program.
    """
    if mesh.devices.flat[0].platform != "cpu" or len(processes_of(mesh)) < jax.process_count():
        return
    keeps = kept_in() in _shared_with_all
    own = _digest(_processor().encode()).hex() if keeps else ""
    if {*from_every_process("the processors of kept programs", own)} != {own} or not keeps:
        return
    try:
        if jax.process_index() == 0:
            lowered.compile()
    finally:
        meet("a program that process 0 compiles", seconds=_COMPILE_SECONDS)


@contextlib.contextmanager
def without_kept_programs() -> Generator[None]:
    """Have JAX compile without reading or writing programs on disk, in all threads of this process.

    JAX writes programs of described devices, which no process can read again, and warns of each at its next
    compilation. Programs from disk also come without XLA's warnings.
    """
    with _SWITCH:
        _wanted.append(jax.config.jax_enable_compilation_cache)  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX asks the setting only once
    try:
        yield
    finally:
        with _SWITCH:
            if len(_wanted) == 1:  # the last of several to exit
                jax.config.update("jax_enable_compilation_cache", _wanted[0])
                compilation_cache.reset_cache()
                _wanted.clear()
            else:
                _wanted.pop()


class _Programs:
    """The store that JAX asks for the bytes of a program: `get`, and `put` for one that it compiled."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._path = cache, cache.folder
        self._processor = _processor()

    def get(self, key: str) -> bytes | None:
        return self._cache.load(self._name(key), _checked)

    def put(self, key: str, value: bytes) -> None:
        self._cache.store(self._name(key), lambda file: file.write(_digest(value) + value))

    def _name(self, key: str) -> str:
        return f"{Cache.key(key, self._processor)}.xla"


_hash_topology = cache_key._hash_accelerator_config  # pyright: ignore[reportPrivateUsage]


def _hash_devices(hash_obj: Any, devices: np.ndarray) -> None:
    """Add devices to a program's name: CPU devices of several processes by their processes, as all see them.

    JAX's own form, of the topology, has there which of the processes this is. The processor is in the entry's name.
    """
    processes = [device.process_index for device in devices.flat]
    if devices.flat[0].platform == "cpu" and len({*processes}) > 1:
        hash_obj.update(repr(processes).encode())
    else:
        _hash_topology(hash_obj, devices)


def _checked(file: BinaryIO) -> bytes:
    """Return an entry's bytes. Raises ValueError if they are not those that were written."""
    digest, value = file.read(_DIGEST_BYTES), file.read()
    if digest != _digest(value):
        raise ValueError("a damaged entry")
    return value


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=_DIGEST_BYTES).digest()


def _processor() -> str:
    """Return the features of this processor that machine code may use; JAX's own key for CPU devices lacks them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return "\n".join(
        [platform.machine(), *(line for line in lines if line.startswith(("model name", "flags", "Features")))]
    )


def _shared(folder: Path | None) -> bool:
    """Return True if all processes of this run keep programs in one folder that each of them reaches.

    Otherwise a process that finds a program may wait for ever for one that compiles it: on several hosts XLA divides
    the search for the best kernels among all.
    """
    joined = joined_as()
    if joined is None or joined[1] == 1:
        return True
    name = f".{from_first_process('the name of a shared file', secrets.token_hex(8))}"
    if folder and joined[0] == 0:
        with contextlib.suppress(OSError):
            make_folder(folder, 0o700)
            (folder / name).touch()
    meet("compiled programs are looked for")
    seen = from_every_process("compiled programs are shared", str(folder is not None and (folder / name).exists()))
    if folder and joined[0] == 0:
        (folder / name).unlink(missing_ok=True)
    return all(word == "True" for word in seen)
