"""Samples during a run: on every mesh and after every restart the text that `jdp generate` writes of that step."""

import json

import pytest
from tiny_runs import refused, sample_files, stopped_at, train

from jdp.cli.main import main


def test_samples_are_those_of_generate_at_their_step(sampled, capsys):
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


def test_a_prompt_must_leave_room_in_the_context(sampled, capsys):
    file, _ = sampled
    error = refused(capsys, "train", file, "--sample.prompt", "def word", "--run-dir", file.parent / "long")
    assert "sample.prompt must be shorter than the model's context of 8 tokens; given one of 8" in error
    assert not (file.parent / "long").exists()


@pytest.mark.rest
@pytest.mark.parametrize("step", [3, 4])
def test_a_stopped_run_writes_the_same_samples(sampled, step):
    """At step 4 both are due, and the visit after the stop makes them."""
    file, folder = sampled
    name = f"stopped-{step}"
    with stopped_at(step):
        assert train(file, "--strategy", "zero3", name=name)[0] != 0
    code, again = train(file, "--strategy", "zero3", name=name)
    assert code == 0 and sample_files(again) == sample_files(folder)
