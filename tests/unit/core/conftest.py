"""The fixture of several files of these tests: the notices of a test."""

import pytest

from jdp.base import notices


@pytest.fixture
def reported(monkeypatch, caplog):
    """The notices of the test, as a function; notices are reported once a process, and earlier ones are forgotten."""
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level("INFO", "jdp")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "jdp"]
