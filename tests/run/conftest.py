"""Most tests here run `jdp train` on the same few models: what XLA made for one is kept for the others.

They compile through JAX's cache on disk, of this run's own and shared with the processes that the tests start; a
stopped run that is resumed, and the undisturbed one that it is compared with, are then one compilation.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

KEPT = {
    "jax_compilation_cache_dir": str(Path(os.environ["JDP_CACHE_DIR"], "xla")),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="package", autouse=True)
def kept_programs() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in KEPT}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in KEPT.items():
            jax.config.update(name, value)
            patched.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()  # it reads the settings once
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
