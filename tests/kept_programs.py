"""What XLA made of a model is kept for the other tests that run it, where most tests run whole commands on few models.

They compile through JAX's cache on disk, of this run's own and shared with the processes that the tests start: a run
that is stopped, the visit that resumes it and the undisturbed run that both are compared with are one compilation.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

FOLDERS = ("run", "prove")


@pytest.fixture(scope="module", autouse=True)
def kept_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.parent.name not in FOLDERS:
        yield
        return
    settings = {
        "jax_compilation_cache_dir": str(Path(os.environ["JDP_CACHE_DIR"], "xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in settings.items():
            jax.config.update(name, value)
            patched.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()  # JAX reads the settings once
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
