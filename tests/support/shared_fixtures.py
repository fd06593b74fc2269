"""Fixtures of tests in several files: caches of the test's own or none, no network, the notices, and scikit-learn."""

import pytest


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """jdp keeps what it reads in a folder of the test, which this returns."""
    monkeypatch.setenv("JDP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def homeless(monkeypatch):
    """The user has neither a home folder nor an entry in passwd, as in many containers."""
    for name in ("HOME", "JDP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", nobody)


@pytest.fixture
def own_hub(own_cache, tmp_path, monkeypatch):
    """Hugging Face too keeps what it reads in a folder of the test, and asks no hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def notices(caplog):
    """What was reported is `notices.text`."""
    caplog.set_level("INFO", "jdp")
    return caplog


@pytest.fixture
def scikit_learn():
    """Import it for the tests that run: collecting them alone would take a second."""
    pytest.importorskip("sklearn")
