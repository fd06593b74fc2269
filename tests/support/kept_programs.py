"""What XLA made of a model is kept for the other tests that run it, where most tests run whole commands on few models.

They compile through `jdp.keep_programs`, as `jdp train` does, into a folder of this run's own that the processes which
the tests start share: a run that is stopped, the visit that resumes it and the undisturbed run that both are compared
with are one compilation. After every file JAX has the settings that it had before: a test may have run `jdp train`.
"""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jdp.core.compiling.persistent_cache import SETTINGS, keep_programs

FOLDERS = ("equality", "core", "models", "launch", "checkpoint", "guard", "report", "prove", "experiment", "run", "cli")


@pytest.fixture(scope="module", autouse=True)
def kept_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size", *SETTINGS)
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patched:
        if request.path.parent.name in FOLDERS:
            least = "jax_persistent_cache_min_compile_time_secs"
            patched.setenv(least.upper(), "0.0")  # children read it
            jax.config.update(least, 0.0)
            assert keep_programs() is not None
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
