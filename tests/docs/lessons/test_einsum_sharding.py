"""Four shardings of one einsum: what each device has, which collectives XLA inserts, and how many bytes."""

import jax
import numpy as np
import pytest
from load import load

from jdp.foresight.targets.resolve import target

lesson = load("einsum_sharding")
B, D, F = 160, 64, 32


CASES = {
    "batch, 2": ("batch", 2, [(B // 2, D), (D, F)], {}, {"all-reduce": 4 * D * F}),
    "batch, 8": ("batch", 8, [(B // 8, D), (D, F)], {}, {"all-reduce": 4 * D * F}),
    "weight, 2": ("weight", 2, [(B, D), (D, F // 2)], {}, {"all-reduce": 4 * B * D}),
    "weight, 8": ("weight", 8, [(B, D), (D, F // 8)], {}, {"all-reduce": 4 * B * D}),
    "both": ("both, two axes", 8, [(B // 4, D), (D, F // 2)], {}, {"all-reduce": 4 * (D * F // 2 + B * D // 4)}),
}


@pytest.mark.parametrize(("way", "devices", "has", "forward", "backward"), CASES.values(), ids=CASES)
def test_each_sharding_reduces_its_gradient(way, devices, has, forward, backward):
    case = lesson.count(way, jax.devices()[:devices], B, D, F)
    assert (case.has, case.forward, case.backward) == (has, forward, backward)
    assert way != "batch" or case.sent == 2 * (devices - 1) / devices * 4 * D * F


def test_both_on_one_axis_gathers_each_pass():
    case = lesson.count("both, one axis", jax.devices(), B, D, F)
    assert case.has == [(B // 8, D), (D // 8, F)]
    assert case.forward == {"all-gather": 4 * D * F}
    assert case.backward["all-gather"] == 4 * D * F


@pytest.mark.aot
def test_on_gpus_the_gradient_is_scattered():
    case = lesson.count("both, one axis", target("h100:1x8").devices, 1280, 512, 256)
    assert case.forward == {"all-gather": 4 * 512 * 256}
    assert case.backward == {"all-gather": 4 * 512 * 256, "reduce-scatter": 4 * 512 * 256}


def test_the_data_parallel_layer_is_the_layer():
    random = np.random.default_rng(0)
    x, inner = random.normal(size=(B, D)).astype(np.float32), lesson.Linear(random.normal(size=(D, F)).astype("f4"))
    result = lesson.DataParallel(inner)(x)
    np.testing.assert_allclose(result, inner(x), atol=1e-5)  # float32 sums of 64 terms
    assert [shard.data.shape for shard in result.addressable_shards] == [(B // 8, F)] * 8


def test_sizes_that_do_not_divide_are_one_error(capsys):
    with pytest.raises(SystemExit) as exiting:
        lesson.main(["--sizes", "100", "64", "32"])
    assert exiting.value.code == 2
    assert "--sizes must divide by 8 devices; given 100 64 32" in capsys.readouterr().err


def test_the_lesson_runs(tmp_path, capsys):
    lesson.main(["--sizes", "160", "64", "32", "--picture", str(tmp_path / "picture.svg")])
    assert "all-reduce 0.00819 MB" in capsys.readouterr().out
    assert "both, two axes" in (tmp_path / "picture.svg").read_text("utf-8")
