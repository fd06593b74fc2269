"""ZeRO by hand: bytes at rest and bytes sent are the paper's, in every phase, and the weights are DDP's."""

import numpy as np
import pytest
from load import LESSONS, load

lesson, popular = load("zero_by_hand"), load("zero_claims")


@pytest.fixture(scope="module")
def found(mesh):
    return {stage: lesson.run(mesh, stage, 2) for stage in lesson.STAGES}


@pytest.mark.parametrize(
    ("stage", "eighths", "sent"),
    [
        ("ddp", (8, 8, 8), [0, 2, 0]),
        ("zero1", (8, 8, 1), [0, 0, 2]),
        ("zero2", (8, 1, 1), [0, 1, 1]),
        ("zero3", (1, 1, 1), [1, 2, 0]),
    ],
)
def test_each_stage_holds_and_sends_the_papers_bytes(found, stage, eighths, sent):
    assert found[stage]["sent"] == sent
    row, parameters = found[stage]["formula"], found[stage]["weights"].size
    assert found[stage]["at_rest"] == [row.parameters, row.gradients, row.optimizer]
    whole = [4 * parameters, 4 * parameters, 8 * parameters]
    assert found[stage]["at_rest"] == [size * part // 8 for size, part in zip(whole, eighths, strict=True)]


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_weights_are_those_of_ddp(found, stage):
    np.testing.assert_allclose(found[stage]["weights"], found["ddp"]["weights"], atol=1e-5)  # float32, two Adam steps


def test_popular_claims_and_what_is_right(found):
    claims = popular.claims({stage: each["sent"] for stage, each in found.items()})
    assert [right for _, _, right in claims] == [227.5, 1120, 2, 0, 1.5, 1, 2, 0]
    assert [claimed for _, claimed, _ in claims] == [210, 840, 3, 2, 3, 2, 2, 1]


def test_bytes_sent_depend_on_the_dtype():
    """zero1 and zero2 send what ddp sends, and zero3 1.5 times that, in one width only."""
    one, two = zip(*(row[1:] for row in popular.sent_by_width()), strict=True)
    assert one == (245, 245, 245, 367.5)
    assert two == (490, 367.5, 367.5, 490)
    readme = (LESSONS / "README.md").read_text("utf-8")
    assert "490, 367.5 and 490 GB" in readme
