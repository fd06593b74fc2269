"""The recipes for models of Hugging Face, at the size of a toy: they run as they stand, and learn what they promise."""

import itertools
import json
from datetime import date
from pathlib import Path

import pytest
from guide_folders import CHAT_TEMPLATE
from tiny_experiment import train_here
from tiny_runs import refused, rows

from jdp.cli.main import main
from jdp.experiment.file import load, to_toml
from jdp.run import loop

RECIPE = Path(__file__).parents[2] / "experiments/sft_chat.toml"
DPO = RECIPE.with_name("dpo.toml")
TOY = {"model.context": 64, "data.length": 64, "train.batch_size": 16, "train.steps": 4, "optimizer.warmup_steps": 2}
TOY |= {"train.eval_every": 0, "train.checkpoint_every": 0, "train.log_every": 1, "sample.length": 8}
TOY |= {"data.heldout_fraction": 0.2, "optimizer.lr": 1e-2, "train.eval_batches": 1}


def given(folder, **more):
    """Return what a user gives on the command line."""
    model = {"model.name": f"hf:{folder}/llama", "train.init_from": f"{folder}/llama"}
    data = "chats.jsonl" if "loss.beta" not in more else "pairs.jsonl"
    table = {**TOY, **model, "data.source": f"{folder}/{data}", **more}
    return {key: str(value) for key, value in table.items()}


def flags(folder, **more):
    return [word for key, value in given(folder, **more).items() for word in (f"--{key}", value)]


def test_a_chat_is_learnt_from_its_answers(chat_llama, tmp_path, capsys):
    """The command of the lab note: the loss falls, and the model answers a question, as its export does."""
    whole = {"train.steps": 40, "train.export": "hf"}
    code = main(["train", str(RECIPE), *flags(tmp_path, **whole), "--run-dir", str(tmp_path)])
    output, losses = capsys.readouterr().out, rows(tmp_path / "sft-chat", "loss")
    assert code == 0 and losses[1] > 5 and losses[40] < 1.5
    assert "26 % of the others learnt" in output
    answer = output.partition("<|im_start|>user\nWhat can you do?<|im_end|>\n<|im_start|>assistant\n")[2]
    assert answer.startswith("It is ") and answer.count("<|im_end|>") <= 1
    asked = ["--prompt", "What can you do?", "--temperature", "0", "--length", "20"]
    for model in ([f"{tmp_path}/sft-chat"], [f"{tmp_path}/sft-chat/export", "--chat"]):
        assert main(["generate", *model, *asked]) == 0
        assert capsys.readouterr().out.startswith("What can you do?\nIt is ")


def test_one_device_and_four_learn_the_same(chat_llama, tmp_path):
    """Weights differ between rows, so a mean of the devices' means would be another loss. fp32: to its rounding."""
    losses, small = [], {"model.layers": 1, "train.init_from": "none", "train.init_names": "jdp", "sample": "none"}
    for devices in (1, 4):
        settings = given(tmp_path, strategy="ddp", precision="fp32", **small, **{"train.accumulate": 1})
        train_here(RECIPE, tmp_path / f"of_{devices}", settings, devices=devices)
        losses.append([*rows(tmp_path / f"of_{devices}/sft-chat", "loss").values()])
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_dated_run_resumes_on_another_day_with_the_day_it_began(chat_llama, tmp_path, monkeypatch):
    template = "{{ strftime_now('%d') }}" + CHAT_TEMPLATE
    (tmp_path / "llama/chat_template.jinja").write_text(template)
    small = {"model.layers": 1, "train.init_from": "none", "train.init_names": "jdp", "sample": "none"}
    settings = given(tmp_path, strategy="ddp", **small, **{"train.steps": 2, "train.accumulate": 1})

    class Day(date):
        now = date(2026, 11, 26)

        @classmethod
        def today(cls):
            return cls.now

    monkeypatch.setattr(loop, "date", Day)
    train_here(RECIPE, tmp_path / "runs", settings, devices=1)
    Day.now = date(2026, 11, 27)
    train_here(RECIPE, tmp_path / "runs", settings, devices=1)
    with pytest.raises(ValueError, match=r"other data .* the run's first start in data\.chat_date"):
        train_here(RECIPE, tmp_path / "runs", settings | {"data.chat_date": "2026-11-27"}, devices=1)


PAIRS = {
    "loss.beta": 0.1,
    "train.batch_size": 32,
    "train.accumulate": 2,
    "train.eval_batches": "all",
    "optimizer.lr": 1e-2,
    "optimizer.warmup_steps": 20,
}


@pytest.fixture
def pairs(chat_llama, tmp_path):
    """Beside `llama/` all 120 pairs of 16 words, of which the earlier in the alphabet is preferred."""
    words = [f"{a}{b}" for a in "abcd" for b in "wxyz"]
    found = [{"prompt": "Which?", "chosen": good, "rejected": bad} for good, bad in itertools.combinations(words, 2)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def test_what_is_preferred_is_learnt(pairs, tmp_path, capsys):
    """The command of the lab note: the better of two words that were not seen together gets the larger reward, and the
    run and its export write an answer. Before the first update rewards are rounding."""
    small = {"model.context": 32, "data.length": 32, "train.steps": 20, "train.eval_every": 10}
    code = main(["train", str(DPO), *flags(tmp_path, **PAIRS, **small), "--run-dir", str(tmp_path)])
    output, folder = capsys.readouterr().out, tmp_path / "dpo"
    first, last = (list(rows(folder, f"{kind}rewards/accuracies").values()) for kind in ("", "eval_"))
    assert code == 0 and first[0] < 0.75 and max(last) > 0.9, (first, last)
    assert "the best by eval_rewards/accuracies" in output
    for model in ([f"{tmp_path}/dpo"], [f"{tmp_path}/dpo/export", "--chat"]):
        assert main(["generate", *model, "--prompt", "Which?", "--temperature", "0", "--length", "8"]) == 0
        assert capsys.readouterr().out.startswith("Which?\n")


RAISES, READS, TEMPLATE = "{{ raise_exception('no') }}", "{% include 'x' %}", "chat_template.jinja"
EOS, UNKNOWN = '{"eos_token": "<|im_end|>"}', '{"messages": [{"role": "me", "content": ""}]}'
REFUSED = {
    "no template": (
        {"tokenizer_config.json": '{"eos_token": "<|im_end|>"}'},
        {},
        "needs a chat template; given",
        "llama/tokenizer.json",
    ),
    "raises": ({TEMPLATE: RAISES}, {}, "llama/chat_template.jinja with", "chats.jsonl, line 1: no"),
    "reads": ({TEMPLATE: READS}, {}, "must read no other file", "llama/chat_template.jinja"),
    "role": ({"../chats.jsonl": UNKNOWN}, {}, "given 'me' in", "chats.jsonl, line 1"),
    "type": ({"../chats.jsonl": '{"messages": 1}'}, {}, "messages must be a list", "chats.jsonl, line 1"),
    "text": ({}, {"data.format": "text"}, 'data must have the field "text"', 'or data.format = "chat": messages'),
    "packing": ({}, {"data.packing": "stream"}, "keeps conversations apart", '"stream"'),
    "tokenizer": ({}, {"data.tokenizer": "none"}, 'data.format = "chat" needs a tokenizer', '"none"'),
    "format": ({}, {"data.format": "text", "data.chat_date": "2026-11-26"}, 'is of data.format = "chat"', '"text"'),
    "date": ({}, {"data.chat_date": "today"}, "must be a day", "today"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_chat_is_one_error(chat_llama, tmp_path, capsys, case):
    files, changed, *words = REFUSED[case]
    for name, content in files.items():
        (tmp_path / "llama" / name).write_text(content)
    error = refused(capsys, "train", RECIPE, *flags(tmp_path, **changed), "--run-dir", tmp_path)
    assert all(word in error for word in words), error


ALIKE = '{"prompt": "a", "chosen": "b", "rejected": "b"}'
DPO_REFUSED = {
    "loss": ({}, {"loss.name": "none"}, 'and loss.name = "dpo" need each other', "no loss.name"),
    "format": ({}, {"data.format": "chat"}, 'and loss.name = "dpo" need each other; given data.format = "chat"', ""),
    "field": ({}, {"data.field": "text"}, 'preferences are the columns "prompt", "chosen" and "rejected"', ""),
    "arrays": ({}, {"data.source": "pairs.npz"}, '"preferences" is of rows of messages', "pairs.npz"),
    "packing": ({}, {"data.packing": "stream"}, '"preferences" keeps conversations apart', '"stream"'),
    "beta": ({}, {"loss.beta": 0}, "loss.beta must be more than 0", "given 0"),
    "column": ({"../pairs.jsonl": '{"prompt": "a", "chosen": "b"}'}, {}, 'the field "rejected"', "pairs.jsonl, line 1"),
    "alike": ({"../pairs.jsonl": ALIKE}, {}, "must not be empty", "1 empty"),
    "template": ({"tokenizer_config.json": EOS}, {}, "needs a chat template; given", "llama"),
    "length": ({}, {"data.length": 4}, "a row must hold a prompt and some of both answers", "given length 4"),
}


@pytest.mark.parametrize("case", DPO_REFUSED)
def test_what_cannot_be_preferences_is_one_error(pairs, tmp_path, capsys, case):
    files, changed, *words = DPO_REFUSED[case]
    for name, content in files.items():
        (tmp_path / "llama" / name).write_text(content)
    error = refused(
        capsys,
        "train",
        DPO,
        *flags(tmp_path, **(PAIRS | {"optimizer.warmup_steps": 2} | changed)),
        "--run-dir",
        tmp_path,
    )
    assert all(word in error for word in words), error


def test_a_resolved_chat_is_read_back(chat_llama, tmp_path):
    experiment = load(RECIPE, given(tmp_path))
    assert (experiment.data.format, experiment.data.packing) == ("chat", "documents")
    (tmp_path / "again.toml").write_text(to_toml(experiment))
    assert load(tmp_path / "again.toml") == experiment
