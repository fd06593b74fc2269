"""`jdp plan --axes` and `--smallest`: which meshes and sizes are tried, why the others are not, and what is said.

The search compiles nothing; what it keeps is compiled by the command on a small model.
"""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jdp.cli import main as cli
from jdp.experiment.file import from_table
from jdp.experiment.plan import search_meshes
from jdp.experiment.tune import Tuning
from jdp.foresight.candidates.meshes import MOST, factorisations
from jdp.foresight.candidates.smallest_cluster import sizes_of
from jdp.foresight.targets.resolve import target

DIGITS = """
name = "digits"
strategy = "zero1"
[model]
name = "mlp"
hidden = [512, 512]
[data]
source = "digits"
[train]
steps = 10
batch_size = 4096
"""
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
ATTENTION = {"*/attention/query/kernel": ["", "", "model"], "*/attention/output/kernel": ["", "model"]}
GPT = {
    "name": "gpt",
    "precision": "bf16",
    "model": {"name": "gpt-nano", "layers": 2, "width": 256, "heads": 4, "kv_heads": 2},
    "data": {"source": "stdlib", "length": 64},
    "train": {"steps": 10, "batch_size": 64},
}


def searched(name, *, strategies=STRATEGIES, accumulate=1, **changed):
    return search_meshes(from_table(GPT | changed), target(name), strategies=strategies, accumulate=[accumulate])


def test_factorisations_keep_replicas_on_whole_hosts_and_the_models_axis_within_one():
    h100s = target("h100:4x8")
    assert factorisations(h100s, {"data": 32}, None) == [{"replica": 2, "data": 16}, {"replica": 4, "data": 8}]
    found = factorisations(h100s, {"data": 32, "model": 1}, "model")
    assert len(found) == 3 * 4 - 1 and all(axes.get("replica", 1) in (1, 2, 4) for axes in found)
    assert {"replica": 4, "data": 1, "model": 8} in found and {"data": 32, "model": 1} not in found
    assert all(axes.get("replica", 1) * axes["data"] * axes["model"] == 32 for axes in found)
    assert factorisations(h100s, {"replica": 2, "data": 4, "pipe": 4}, None) == [
        {"replica": 1, "data": 8, "pipe": 4},
        {"replica": 4, "data": 2, "pipe": 4},
    ]


def test_replicas_of_few_hosts_are_kept_then_what_sends_least_and_the_rest_is_told():
    found = searched("h100:8x8")
    whole_hosts = {"replica": 8, "data": 8}
    assert [way.axes == whole_hosts for way in found.kept] == [True, True, False] and len(found.kept) == MOST
    assert {way.strategy for way in found.kept[:2]} == {"zero1", "zero3"}
    assert found.ways == 3 * 2, "ddp sums over replica as over data, and with one microbatch zero2 is zero1"
    assert "no [rules] shard parameters" in found.words and "3 others, zero" in found.words
    assert searched("h100:8x8", accumulate=2, train={"steps": 1, "batch_size": 128}).ways == 3 * 3
    alone = searched("h100:1x8")
    assert not alone.kept and "no other mesh can be tried. Left out: replicas, as there is one host" in alone.words


def test_the_models_axis_is_searched_where_rules_shard_over_it_and_divides_the_heads():
    found = searched("h100:2x8", mesh={"data": -1, "model": 2}, rules=ATTENTION)
    kept = [dict(way.axes) for way in found.kept]
    assert all({"data", "model"} <= axes.keys() and axes["model"] in (1, 2) for axes in kept)
    assert any(axes["model"] == 1 for axes in kept), "GPT-nano's activations are larger than its weights"
    assert "model=4 does not divide the 2 key value heads" in found.words
    assert "model=8 does not divide the 4 heads" in found.words or "model=8 does not divide the 2" in found.words


def test_what_no_device_can_hold_or_no_batch_divide_is_not_compiled():
    wide = {"name": "gpt-nano", "layers": 96, "width": 8192, "heads": 64, "kv_heads": 64, "scan": True}
    found = searched("h100:8x8", model=wide, strategies=["zero3"])
    assert found.kept and "whose state alone is more than a device has, such as zero3 replica=8 data=8" in found.words
    few = {"steps": 10, "batch_size": 8}
    rules = {"mesh": {"data": -1, "model": 8}, "rules": {"*/mlp/up/kernel": ["", "", "model"]}}
    assert "8 rows do not divide over 64 shards" in searched("h100:8x8", train=few, **rules).words


def test_on_devices_without_link_rates_bytes_are_compared():
    found = searched("cpu:8", mesh={"data": -1, "model": 2}, rules=ATTENTION)
    assert not found.in_seconds and found.kept and "sends_bytes" in found.to_json()["compiled"][0]


def test_clusters_grow_from_parts_of_a_host_to_whole_hosts():
    names = sizes_of(target("h100:2x8"))
    assert names[:6] == ["h100:1x1", "h100:1x2", "h100:1x4", "h100:1x8", "h100:2x8", "h100:4x8"]
    assert sizes_of(target("cpu:4")) == []
    assert sizes_of(replace(target("h100:1x6")))[:4] == ["h100:1x1", "h100:1x2", "h100:1x4", "h100:1x6"]


# The command.


@pytest.fixture
def plan(tmp_path, monkeypatch, capfd):
    """Run `jdp plan` on digits; (exit code, stdout, stderr)."""
    (tmp_path / "digits.toml").write_text(DIGITS)
    monkeypatch.setenv("JDP_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments):
        code = cli.main(["plan", str(tmp_path / "digits.toml"), *arguments])
        captured = capfd.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run


def test_other_meshes_are_rows_of_table_object_and_page(plan, tmp_path):
    page = tmp_path / "page.html"
    given = ("--target", "h100:2x2", "--strategy", "zero3", "--axes")
    done = plan(*given, "--json", "--html", str(page))
    found = json.loads(done.out)
    assert done.code == 0, done.err
    assert [row["mesh"] for row in found["strategies"]] == [None, {"replica": 2, "data": 2}]
    assert found["axes"]["ways"] == 1 and found["axes"]["compiled"][0]["mesh"] == {"replica": 2, "data": 2}
    assert found["choice_mesh"] is None or "--mesh.replica 2 --mesh.data 2" in found["why"]
    assert found["smallest"]["target"] == "h100:1x1" and found["smallest"]["compiled"] is False
    assert {"zero3 replica=2 data=2", "smallest that fits"} <= {*_texts(page)}
    table = plan(*given).out
    assert "zero3 replica=2 data=2" in table and "--axes: of 1 way on other meshes 1 compiled" in table
    assert "foreseen, not compiled (--smallest compiles it): zero3 on h100:1x1" in table


def test_tuning_goes_on_from_other_meshes(tmp_path):
    (tmp_path / "digits.toml").write_text(DIGITS)
    tuning = Tuning(tmp_path / "digits.toml", {}, target("h100:2x2"), ["zero1", "zero3"], axes=True)
    meshes = tuning.dimensions()[0].choices
    assert [choice.label for choice in meshes[:2]] == ["zero1", "zero3"]
    assert {choice.label for choice in meshes[2:]} == {"zero1 replica=2 data=2", "zero3 replica=2 data=2"}
    assert ("mesh.replica", "2") in meshes[2].overrides


def _texts(page):
    return [text.strip() for text in re.split(r"<[^>]*>", page.read_text("utf-8"))]


def test_the_smallest_cluster_is_compiled_with_the_size_below(plan):
    """6.4 G parameters, 72 GiB of state: a part of that fits one of two H100s."""
    wide = ("--model.hidden", "[80000, 80000]", "--strategy", "zero3")
    done = plan("--target", "h100:1x4", "--smallest", "--json", *wide)
    assert done.code == 0, done.err
    least = json.loads(done.out)["smallest"]
    assert least["compiled"] and least["target"] == "h100:1x2" and least["below"]["target"] == "h100:1x1"
    assert least["needed"] <= least["available"] < least["below"]["needed"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--target", "h100:2x2", "--axes", "--mesh.data", "4"),
            "--axes searches the mesh, and keys that are given stay",
        ),
        (("--target", "h100:2x2", "--axes", "--tune", "--mesh.data", "4"), "given --mesh.data too"),
        (("--target", "cpu:8", "--smallest", "--strategy", "ddp"), "The smallest cluster is one of described GPUs"),
        (("--target", "h100:1x2", "--tune", "--smallest"), "goes without --smallest"),
    ],
)
def test_mistakes(plan, given, said):
    done = plan(*given)
    assert (done.code, done.out) == (2, "") and said in done.err and "Traceback" not in done.err
