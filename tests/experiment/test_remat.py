"""`model.remat = "auto"`: the first policy of the ladder that fits, the same on every process."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

import jdp.experiment.remat as remat
from jdp.cli import main as cli
from jdp.experiment.file import from_table, load
from jdp.experiment.remat import ladder, settled
from jdp.foresight.targets.resolve import target
from jdp.models import GPT, SIZES
from jdp.run.folder import FILE

GIB = 2**30
TABLE = {
    "name": "auto",
    "model": {"name": "gpt-nano", "layers": 2, "context": 64, "remat": "auto"},
    "data": {"source": "stdlib"},
    "train": {"steps": 1, "batch_size": 8},
}


def experiment(**model):
    return from_table({**TABLE, "model": {**TABLE["model"], **model}})


def test_the_ladder_is_that_of_auto_alone():
    assert ladder(experiment()) == ("dots", "dots_except_mlp", "full")
    assert ladder(experiment(scan=False)) == ("none", "dots", "dots_except_mlp", "full")
    assert ladder(experiment(remat="dots")) == ladder(experiment(remat="none")) == ()
    assert ladder(from_table({**TABLE, "model": {"name": "mlp", "features_in": 4}, "data": {"source": "a.npz"}})) == ()


@pytest.mark.parametrize(
    ("programs", "chosen", "said"),
    [
        ({"dots": (10, False)}, "dots", '"dots" needs 10 GiB'),
        (
            {"dots": (90, False), "dots_except_mlp": (70, False)},
            "dots_except_mlp",
            '"dots" needs 90 GiB, "dots_except_mlp" needs 70 GiB',
        ),
        ({"dots": (70, True), "dots_except_mlp": (None, False)}, "full", 'does not compile, "full" keeps least'),
    ],
)
def test_the_first_that_fits_is_taken_and_reported(monkeypatch, notices, programs, chosen, said):
    """75 GiB less what the CUDA context takes, and a twentieth; a step that XLA changed for want of memory is none."""

    def compiled(given, on, cache):
        needed, changed = programs[given.model.config.remat]
        return None if needed is None else needed * GIB, changed

    monkeypatch.setattr(remat, "_compiled", compiled)
    on = replace(target("h100:1x1"), memory_bytes=80 * GIB)
    assert settled(experiment(), on).model.config.remat == chosen
    assert f'model.remat = "auto" is "{chosen}": of 74.1 GiB that a step may take' in notices.text
    assert said in notices.text


def test_every_process_takes_what_fits_all(monkeypatch, notices):
    monkeypatch.setattr(remat, "_compiled", lambda given, on, cache: (1, False))
    answers = iter([["fits", "no"], ["fits", "fits"]])
    monkeypatch.setattr(remat, "from_every_process", lambda name, value: next(answers))
    assert settled(experiment(), target("h100:1x1")).model.config.remat == "dots_except_mlp"


@pytest.mark.aot
def test_a_small_model_keeps_its_products_on_a_gpu(notices):
    assert settled(experiment(), target("h100:1x1")).model.config.remat == "dots"


@pytest.mark.parametrize(("limit", "chosen"), [(GIB, "dots"), (1, "full")])
def test_devices_at_hand_compile_what_they_will_run(monkeypatch, notices, limit, chosen):
    monkeypatch.setattr(remat, "_limit", lambda on: limit)
    assert settled(experiment(layers=1)).model.config.remat == chosen
    assert "does not compile" not in notices.text


def test_without_a_memory_of_their_own_devices_keep_everything(notices):
    assert settled(experiment(), target("cpu:2")).model.config.remat is None
    assert '"auto" is "none" on cpu:2' in notices.text


def test_a_run_records_the_policy(tmp_path, capsys):
    (tmp_path / "auto.toml").write_text(
        'name = "auto"\n[model]\nname = "gpt-nano"\nlayers = 1\ncontext = 32\nremat = "auto"\n'
        '[data]\nsource = "stdlib"\n[train]\nsteps = 1\nbatch_size = 8\n'
    )
    for _ in range(2):  # and comes back to its folder
        assert cli.main(["train", str(tmp_path / "auto.toml"), "--run-dir", str(tmp_path)]) == 0
    assert load(tmp_path / "auto" / FILE).model.config.remat is None


def test_outside_of_files_a_policy_is_named():
    model = GPT(replace(SIZES["gpt-nano"], layers=1, width=16, heads=2, kv_heads=1, remat="auto"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r'"auto" is chosen where an experiment file is compiled .* Name a policy'):
        model(jnp.zeros((1, 4), int))


def test_a_policy_to_compare_is_no_auto(tmp_path, capfd):
    (tmp_path / "auto.toml").write_text('name = "a"\n[model]\nname = "gpt-nano"\n[train]\nsteps = 1\nbatch_size = 8\n')
    assert cli.main(["plan", str(tmp_path / "auto.toml"), "--remat", "dots,auto", "--target", "cpu:2"]) == 2
    assert "leave it out, and give --model.remat auto" in capfd.readouterr().err


def test_a_plan_compares_what_auto_stands_for(tmp_path, capfd):
    (tmp_path / "auto.toml").write_text(
        'name = "a"\n[model]\nname = "gpt-nano"\nlayers = 1\nremat = "auto"\n[train]\nsteps = 1\nbatch_size = 8\n'
    )
    given = ("--target", "cpu:8", "--strategy", "ddp", "--data.length", "32", "--json")
    assert cli.main(["plan", str(tmp_path / "auto.toml"), *given]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [each["remat"] for each in report["strategies"]] == ["dots", "dots_except_mlp", "full"]
    assert "first that fits, of dots, dots_except_mlp, full" in report["notes"][0]
