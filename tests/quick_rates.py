"""The rates of this machine's processor are measured a tenth as long where no test is about times that are foreseen.

Measuring takes every core a fifth of a second for each of seven programs, once for each number of devices: more than
the other work of a test. What was measured so is forgotten after the file.
"""

from collections.abc import Iterator

import pytest

FOLDERS = ("cli", "lessons", "report", "run", "test_examples")


@pytest.fixture(scope="module", autouse=True)
def quick_rates(request: pytest.FixtureRequest) -> Iterator[None]:
    if {request.path.parent.name, request.path.stem}.isdisjoint(FOLDERS):
        yield
        return
    from jdp.foresight.timing import cpu_rates

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu_rates, "_SECONDS", 0.02)
        cpu_rates.measure.cache_clear()
        yield
    cpu_rates.measure.cache_clear()
