"""The markers `rest` and `aot`.

`rest` leaves a test out of the default run; `@pytest.mark.default_ids("zero3-*", "ddp-1")` leaves out the ids that none
of these patterns matches, `*` being any text, and without patterns all ids that are not slow. The default tests hold
every promise once, by its cheapest test; the rest are products of settings, other variants, real clusters and faults.

`aot` is on every test that describes GPUs (`target("h100:8x8")`), for which it needs XLA's GPU compiler, from
`pip install '.[aot]'`. A test that describes GPUs without the marker fails.
"""

import fnmatch

import pytest
from jax.experimental import topologies

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""What this run collected, before it selected some."""
_unmarked: str | None = None


def is_default(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("rest", "slow", "gpu"))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: object):
    items = yield
    for mark in getattr(obj, "pytestmark", []):
        if mark.name == "default_ids":
            ids = [item.callspec.id for item in items]
            stay = {pattern: fnmatch.filter(ids, pattern) for pattern in mark.args}
            if unknown := [pattern for pattern in stay if not stay[pattern]]:
                raise collector.CollectError(f"{name} has no id like {unknown}")
            for item in items:
                if is_default(item) and not any(item.callspec.id in matching for matching in stay.values()):
                    item.add_marker(pytest.mark.rest)
    return items


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = [*items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    global _unmarked
    _unmarked = None if item.get_closest_marker("aot") else item.nodeid
    try:
        return (yield)
    finally:
        _unmarked = None


_describe = topologies.get_topology_desc


def _for_marked_tests(*arguments: object, **options: object) -> object:
    if _unmarked is not None:
        pytest.fail(f"a test that describes GPUs is marked aot; given {_unmarked}: write @pytest.mark.aot above it")
    return _describe(*arguments, **options)  # type: ignore[arg-type]


topologies.get_topology_desc = _for_marked_tests
