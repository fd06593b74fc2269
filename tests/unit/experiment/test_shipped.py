"""The experiments that jdp ships are read by their names, in any folder."""

import os

import pytest
from paths import EXPERIMENTS

from jdp.cli import launch
from jdp.experiment.file import ExperimentError, load, shipped, to_toml

NEED_A_FOLDER = {"finetune_hf_llama", "continue_pretraining", "sft_chat"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(name):
    with pytest.raises(ExperimentError) as caught:
        load(name)
    return str(caught.value)


def test_the_files_of_the_clone_are_shipped():
    assert shipped() == {file.stem: file for file in EXPERIMENTS.glob("*.toml")}


@pytest.mark.parametrize("name", sorted({file.stem for file in EXPERIMENTS.glob("*.toml")} - NEED_A_FOLDER))
def test_a_name_is_the_experiment(name, monkeypatch):
    """In the clone's folder the paths are the same too; `..` in them is written out."""
    monkeypatch.chdir(EXPERIMENTS.parent)
    by_name, by_file = load(name), load(EXPERIMENTS / f"{name}.toml")
    assert to_toml(by_name) == to_toml(by_file).replace("/experiments/..", "")


def test_its_paths_start_at_the_working_directory(elsewhere):
    experiment = load("finetune_lora")
    assert experiment.train.init_from == str(elsewhere / "runs" / "quickstart")
    for name in NEED_A_FOLDER:
        assert f"{elsewhere / 'llama'} is not on this machine. Download the model first" in refusal(name)


def test_a_path_of_that_name_goes_first(elsewhere):
    (elsewhere / "quickstart").mkdir()
    assert refusal("quickstart").startswith("quickstart is a folder, not an experiment file")


def test_an_unknown_name_lists_the_shipped_experiments():
    listed = f"jdp ships {', '.join(shipped())}"
    assert refusal("nothing") == f"nothing: there is no such file; {listed}: write one of these names, or a TOML file's"
    assert refusal("gpt2-124m") == f"gpt2-124m: there is no such file; did you mean gpt2_124m? {listed}"
    assert refusal("experiments/hsdp.toml").endswith("there is no such file; jdp ships one: write hsdp")


def test_a_file_without_its_ending_is_suggested(elsewhere):
    (elsewhere / "digits.toml").touch()
    assert "there is no such file; did you mean digits.toml? jdp ships" in refusal("digits")


def test_launch_takes_a_name_except_a_commands(elsewhere, monkeypatch):
    assert launch._program(["quickstart", "--train.steps", "2"]) is None
    command = elsewhere / "quickstart"
    command.touch(0o755)
    monkeypatch.setenv("PATH", str(elsewhere), prepend=os.pathsep)
    assert launch._program(["quickstart"]) == ["quickstart"]
