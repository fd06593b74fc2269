"""Evaluations and samples on the page of runs: every number, no markup of a name's or a text's own, nothing damaged."""

import json

import pytest
from test_plan_page import HOSTILE
from test_run_page import rows_of, run_of

from jdp.report.pages import run_page
from jdp.run.read_folder import read_samples

SAMPLES = [{"step": step, "prompt": "a", "text": f"text {step} {HOSTILE}"} for step in (10, 20)]
METRICS = {"eval_top5_accuracy": 0.75, "eval_web_top5_accuracy": 0.5}
METRICS |= {"eval_web_loss": 2.0, "eval_web_perplexity": 7.389}


def test_every_finding_is_on_the_page_and_escaped():
    page = run_page([run_of(samples=SAMPLES, rows=[*rows_of(), {"step": 60, "eval_loss": 3.1, **METRICS}])])
    assert HOSTILE not in page and page.count("<script") == 1
    for heading in ("Evaluated data sets", "Samples"):
        assert f">{heading}</h2>" in page
    assert ">web</th>" in page and "eval_top5</th>" not in page and ">7.389</td>" in page
    assert page.index("Step 20") < page.index("Step 10")


def test_runs_without_findings_lack_the_section(tmp_path):
    page = run_page([run_of(), run_of("b")])
    assert not [name for name in ("Samples", "Evaluated data") if name in page]
    assert read_samples(tmp_path, notes := []) == [] and not notes


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"{", b"[]", b'{"step": "x"}', b""])
def test_damaged_samples_are_left_out_and_noted(tmp_path, damage):
    (tmp_path / "samples").mkdir()
    good = {"step": 5, "prompt": "a", "text": "line\u2028separator"}
    (tmp_path / "samples/5.jsonl").write_bytes(json.dumps(good, ensure_ascii=False).encode() + b"\n" + damage)
    notes = []
    assert read_samples(tmp_path, notes) == [good]
    assert len(notes) == bool(damage) and all("left out" in note for note in notes)
