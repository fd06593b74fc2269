"""The experiments that jdp ships are read by their names in any folder; `jdp new` copies one, and says what is next."""

import os
import tomllib

import pytest
from paths import EXPERIMENTS
from tiny_runs import refused

from jdp.cli import launch
from jdp.cli import main as cli
from jdp.experiment.data import open_data
from jdp.experiment.file import ExperimentError, copied, load, shipped, to_toml

NEED_A_FOLDER = {"finetune_hf_llama", "continue_pretraining", "sft_chat"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_file_is_a_renamed_shipped_experiment(here, capsys):
    assert cli.main(["new", "mine"]) == 0
    assert capsys.readouterr().out == "wrote mine.toml. Next:\n  jdp plan mine.toml\n  jdp train mine.toml\n"
    assert load("mine.toml") == load("quickstart", {"name": "mine"})
    assert "#   jdp train mine.toml\n# Hardware: 4 virtual CPU devices" in (here / "mine.toml").read_text()


@pytest.mark.parametrize("start", sorted(shipped().keys() - NEED_A_FOLDER))
def test_a_shipped_experiment_is_the_same_by_name_file_and_copy(here, start, monkeypatch):
    """Paths too, which start at the same folder; `..` in those of a file is written out."""
    assert cli.main(["new", "mine", "--from", start]) == 0
    assert to_toml(load("mine.toml")) == to_toml(load(start, {"name": "mine"}))
    monkeypatch.chdir(EXPERIMENTS.parent)
    assert to_toml(load(start)) == to_toml(load(EXPERIMENTS / f"{start}.toml")).replace("/experiments/..", "")


def test_absent_data_are_named_with_their_download(here, capsys):
    assert cli.main(["new", "mine", "--from", "gpt2_124m"]) == 0
    assert "; its comments tell how to get openwebtext/**/*.parquet, gpt2, which it " in capsys.readouterr().out
    (here / "gpt2").mkdir()  # without its file, as a download that was interrupted
    with pytest.raises(ExperimentError) as caught:
        open_data(load("mine.toml", {"eval.other.source": "llama/*.txt"}))
    rule, fix = "must be on this machine; there is no", "fix the path, or hf download"
    assert str(caught.value).split("\n") == [
        f"data.source {rule} {here}/openwebtext/**/*.parquet: {fix} Skylion007/openwebtext --repo-type dataset "
        f"--local-dir {here}/openwebtext",
        f"data.tokenizer {rule} {here}/gpt2/tokenizer.json: {fix} openai-community/gpt2 tokenizer.json "
        f"--local-dir {here}/gpt2",
        f"eval.NAME.source {rule} {here}/llama/*.txt: fix the path",
    ]


@pytest.mark.aot
def test_the_plan_command_has_the_meshs_gpus(capsys):
    targets = {"gpt2_124m": "h100:1x8", "hsdp": "h100:8x8", "digits_resnet": None}
    for start, target in targets.items():
        assert cli.main(["new", start, "--from", start]) == 0
        assert f"jdp plan {start}.toml{f' --target {target}' if target else ''}\n" in capsys.readouterr().out


def test_the_help_names_what_is_shipped(capsys):
    assert cli.main(["new", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in shipped() if name not in shown] == []
    assert shipped() == {file.stem: file for file in EXPERIMENTS.glob("*.toml")}


MISTAKES = {
    "exists": (["mine"], "jdp new replaces no file; given mine.toml, which exists: choose another NAME"),
    "ending": (["other.toml"], "NAME is without .toml; given other.toml: write other"),
    "path": (["a/b"], "NAME must be letters, digits, dots, dashes and underscores, up to 200"),
    "unknown start": (["other", "--from", "x"], f"that jdp ships, one of {', '.join(shipped())}; given"),
}


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_error_and_writes_nothing(here, capsys, arguments, expected):
    (here / "mine.toml").write_text("kept")
    error = refused(capsys, "new", *arguments)
    assert expected in error and error.count("\n") == 1
    assert [file.name for file in here.iterdir()] == ["mine.toml"] and (here / "mine.toml").read_text() == "kept"


def refusal(name):
    with pytest.raises(ExperimentError) as caught:
        load(name)
    return str(caught.value)


def test_its_paths_start_at_the_working_directory(here):
    experiment = load("finetune_lora")
    assert experiment.train.init_from == str(here / "runs" / "quickstart")
    table = tomllib.loads(copied("finetune_hf_llama", "mine"))
    assert (table["model"]["name"], table["train"]["init_from"]) == ("hf:llama", "llama")
    for name in NEED_A_FOLDER:
        assert f"{here / 'llama'} is not on this machine. Download the model first" in refusal(name)


def test_an_unknown_name_lists_the_shipped_experiments(here):
    listed = f"jdp ships {', '.join(shipped())}"
    assert refusal("nothing") == f"nothing: there is no such file; {listed}: write one of these names, or a TOML file's"
    assert refusal("gpt2-124m") == f"gpt2-124m: there is no such file; did you mean gpt2_124m? {listed}"
    assert refusal("experiments/hsdp.toml").endswith("there is no such file; jdp ships one: write hsdp")
    (here / "digits.toml").touch()
    assert "there is no such file; did you mean digits.toml? jdp ships" in refusal("digits")
    (here / "quickstart").mkdir()  # a path of that name goes first
    assert refusal("quickstart").startswith("quickstart is a folder, not an experiment file")


def test_launch_takes_a_name_except_a_commands(here, monkeypatch):
    assert launch._program(["quickstart", "--train.steps", "2"]) is None
    command = here / "quickstart"
    command.touch(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    assert launch._program(["quickstart"]) == ["quickstart"]
