"""Samples during a run: on every mesh and after every restart the text that `jdp generate` writes of that step."""

import json
import signal

import pytest
from tiny_runs import refused, sample_files, stopped_at, train

from jdp.cli.main import main
from jdp.run.signals import StopRequest


def test_samples_are_what_one_device_writes_from_the_checkpoint_of_their_step(sampled, capsys):
    _, folder = sampled
    assert sorted(path.name for path in (folder / "samples").iterdir()) == ["2.jsonl", "4.jsonl", "6.jsonl"]
    texts = set()
    for step in (2, 4, 6):
        rows = [json.loads(line) for line in (folder / f"samples/{step}.jsonl").read_text().splitlines()]
        capsys.readouterr()
        words = ["--prompt", "de", "--prompt", "par", "--length", "5", "--step", str(step)]
        assert main(["generate", str(folder), *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["texts"]
        assert [(row["step"], row["prompt"]) for row in rows] == [(step, "de"), (step, "par")]
        assert [row["text"] for row in rows] == [one["prompt"] + one["text"] for one in found]
        texts.add(rows[0]["text"])
    assert len(texts) > 1, "the model learns"


@pytest.mark.rest
@pytest.mark.parametrize("step", [3, 4])
def test_a_run_that_is_stopped_writes_the_same_samples(sampled, step):
    """At step 4 both are due, and the visit after the stop makes them."""
    file, folder = sampled
    name = f"stopped-{step}"
    with stopped_at(step):
        assert train(file, "--strategy", "zero3", name=name)[0] != 0
    code, again = train(file, "--strategy", "zero3", name=name)
    assert code == 0 and sample_files(again) == sample_files(folder)


@pytest.mark.rest
def test_a_signal_during_an_evaluation_leaves_the_sample_to_the_next_visit(sampled):
    file, folder = sampled

    def poll(self):
        self.signal = signal.SIGINT
        return True

    with stopped_at(99) as patched:
        patched.setattr(StopRequest, "poll", poll)
        code, stopped = train(file, "--strategy", "zero3", name="evaluating")
    assert code == 130 and not sample_files(stopped)
    code, again = train(file, "--strategy", "zero3", name="evaluating")
    assert code == 0 and sample_files(again) == sample_files(folder)


@pytest.mark.rest
def test_without_every_there_is_a_sample_at_the_end(sampled, capsys):
    file, _ = sampled
    code, folder = train(file, "--sample.every", "0", "--train.steps", "1", "--sample.prompt", "me", name="end")
    text = json.loads((folder / "samples/1.jsonl").read_text())["text"]
    assert code == 0 and [path.name for path in (folder / "samples").iterdir()] == ["1.jsonl"]
    assert f"sample:\n{text}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "given", "fix"),
    [
        ("sample.every", "-1", "sample.every"),
        ("sample.every", "1.5", "sample.every"),
        ("train.eval_metrics", '["bits_per_bite"]', "did you mean bits_per_byte?"),
        ("train.eval_metrics", '["top0_accuracy"]', "train.eval_metrics"),
        ("train.eval_metrics", '["accuracy", "accuracy"]', "once"),
        ("data.weights", "loss_mask", 'ids = "input_ids"'),
        ("data.ids", "input_ids", "[sample] is for a GPT and text with a known data.tokenizer"),
    ],
)
def test_bad_keys_are_refused_before_a_run_begins(sampled, capsys, key, given, fix):
    file, _ = sampled
    error = refused(capsys, "train", file, "--name", "bad", f"--{key}", given)
    assert fix in error and not (file.parent / "runs" / "bad").exists()


@pytest.mark.parametrize("prompt", ["[]", '""', '["a", ""]', '["a", 3]'])
def test_prompts_are_texts(sampled, capsys, prompt):
    file, _ = sampled
    bad = file.with_name("bad.toml")
    bad.write_text(file.read_text().replace('["de", "par"]', prompt))
    assert "sample.prompt must be text" in refused(capsys, "train", bad)
