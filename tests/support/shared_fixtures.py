"""Fixtures of tests in several files: caches of the test's own or none, no network, the notices, and scikit-learn."""

import sys

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


@pytest.fixture(scope="session")
def mesh():
    """All eight devices, on the axis `data`."""
    import jdp

    return jdp.make_mesh(data=8)


@pytest.fixture
def together(tmp_path, capfd):
    """Run a program as two processes with two devices each; return the exit code, stdout and stderr."""
    from own_process import environment

    from jdp.launch import launch

    def run(text):
        (program := tmp_path / "program.py").write_text(text)
        proxied = environment(http_proxy="http://127.0.0.1:9")  # which the processes must not ask for each other
        code = launch([sys.executable, str(program)], 2, devices_per_process=2, environment=proxied)
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def scikit_learn():
    """Import it for the tests that run: collecting them alone would take a second."""
    pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The file of an experiment with samples, and the folder of its run on eight devices, sharded."""
    from tiny_experiment import tables, write_tiny
    from tiny_runs import train

    course = {"steps": 6, "batch_size": 16, "eval_every": 2, "eval_batches": "all", "checkpoint_every": 3}
    written = tables(
        optimizer={"name": "adamw", "lr": 0.05},
        train=course | {"eval_metrics": ["bits_per_byte"]},
        sample={"prompt": ["de", "par"], "every": 2, "length": 5},
    )
    file = write_tiny(tmp_path_factory.mktemp("samples"), written)
    code, folder = train(file, "--strategy", "zero3", "--train.checkpoint_every", "2", name="whole")
    assert code == 0
    return file, folder


@pytest.fixture
def fresh_notices(monkeypatch):
    """Notices are reported once a process: earlier ones are forgotten."""
    monkeypatch.setattr("jdp.base.notices._said", set())


@pytest.fixture
def reported(fresh_notices, caplog):
    """The notices of the test, as a function."""
    caplog.set_level("INFO", "jdp")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "jdp"]
