"""What evaluations found on the page of runs: every number, no markup of a name's or a text's own, nothing damaged."""

import json

import pytest
from test_plan_page import HOSTILE
from test_run_page import rows_of, run_of

from jdp.cli.found import read_found
from jdp.report.evaluations import Found
from jdp.report.run_page import run_page

FOUND = Found(
    40,
    {"eval": {"classes": ["cat", HOSTILE], "counts": [[0, 0, 7], [0, 1, 3], [1, 1, 5], [2, 0, 1]]}},
    {"eval_web": [{"document": i, "tokens": 40 + i, "loss": 1.0 + i / 7, "text": HOSTILE} for i in range(30)]},
    [{"step": step, "prompt": "a", "text": f"text {step} {HOSTILE}"} for step in (10, 20)],
)
METRICS = {
    "eval_top5_accuracy": 0.75,
    "eval_web_loss": 2.0,
    "eval_web_perplexity": 7.389,
    "eval_web_top5_accuracy": 0.5,
}


def test_every_finding_is_on_the_page_and_escaped():
    page = run_page([run_of(found=FOUND, rows=[*rows_of(), {"step": 60, "eval_loss": 3.1, **METRICS}])])
    assert HOSTILE not in page and page.count("<script") == 1
    for heading in ("Evaluated data sets", "Confused classes", "Documents", "Samples"):
        assert f">{heading}</h2>" in page
    assert ">web</th>" in page and "eval_top5</th>" not in page and ">7.389</td>" in page
    assert "held out at step 40: 12 of 16 right" in page and 'rgba(213,94,0,0.20)">3</td>' in page  # 0.65 * 3 / 10
    assert "30 documents; the largest losses" in page and ">29</th>" in page and ">9</th>" not in page
    assert page.index("Step 20") < page.index("Step 10")


def test_a_run_without_findings_has_no_section_of_them():
    page = run_page([run_of(), run_of("b")])
    assert not [name for name in ("Confused", ">Documents<", "Samples", "Evaluated data") if name in page]


def test_many_classes_are_a_list_of_pairs():
    counts = [[i, (i + 1) % 50, i + 1] for i in range(50)]
    page = run_page([run_of(found=Found(1, {"eval": {"classes": [f"c{i}" for i in range(50)], "counts": counts}}))])
    assert "taken for</th>" in page and "rgba(" not in page.partition("Confused classes")[2].partition("</section>")[0]
    assert "20 of 50 pairs" in page and ">c49</th>" in page and ">c3</th>" not in page


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"{", b"[]", b"null", b'{"classes": 3, "counts": [[1]]}', b'"x"', b""])
def test_damaged_files_are_left_out_and_noted(tmp_path, damage):
    place, samples = tmp_path / "evaluations/20", tmp_path / "samples"
    place.mkdir(parents=True)
    samples.mkdir()
    (tmp_path / "evaluations/x").mkdir()
    good = {"document": 0, "tokens": 3, "nats": 1.5, "loss": 0.5, "text": "line\u2028separator", "bits_per_byte": "?"}
    (place / "eval-documents.jsonl").write_bytes(json.dumps(good, ensure_ascii=False).encode() + b"\n" + damage)
    (place / "eval-confusion.json").write_bytes(damage)
    (samples / "5.jsonl").write_bytes(damage)
    notes = []
    found = read_found(tmp_path, notes)
    assert not found.confusion and not found.samples and found.step == 20
    kept = {name: value for name, value in good.items() if name != "bits_per_byte"}
    assert found.documents == {"eval": [kept]}
    assert len(notes) == (3 if damage else 1) and all("left out" in note for note in notes)
    assert run_page([run_of(found=found)])


def test_a_folder_without_such_files_is_read(tmp_path):
    assert read_found(tmp_path, notes := []) == Found() and not notes
