"""What each loop sends by its formula, that all make one gradient, and that unequal microbatches need sums."""

import jax
import pytest
from load import load

lesson, toy = load("gradient_accumulation"), load("toy")
PSI = 64 * 128 + 3 * 128 * 128 + 128 * 16 + 4 * 128 + 16
D = 4 * PSI * 7 / 8
gradient = jax.jit(jax.grad(toy.total_loss))


@pytest.mark.parametrize(("way", "sent"), [("once", 2 * D), ("each", 4 * 2 * D), ("scattered", 4 * D + D)])
def test_each_way_sends_its_formula(mesh, way, sent):
    program = lesson.by_hand(mesh, way, 4)
    given = jax.jit(lambda key: toy.init(key, lesson.WIDTHS))(jax.random.key(0)), toy.make_batch(0, lesson.ROWS)
    right = jax.tree.map(lambda grad: grad / lesson.ROWS, gradient(*given))
    assert lesson.apart(program(*given), right) < 1e-5  # float32 sums of 2048 rows in another order
    assert lesson.sent_and_held(program)[0] == sent


def test_more_microbatches_need_less_memory(mesh):
    held = [lesson.sent_and_held(lesson.by_hand(mesh, "once", k))[1] for k in (1, 4)]
    assert held[1] < held[0]


@pytest.mark.rest
@pytest.mark.parametrize(("strategy", "sent"), [("ddp", 2 * D), ("zero2", 4 * D + D)])
def test_jdp_reduces_where_the_strategy_says(mesh, strategy, sent):
    found = lesson.with_jdp(mesh, strategy, 4, 0)[0]
    assert found == pytest.approx(sent, abs=512)  # scalars: the loss, and two sums a parameter that check the update


@pytest.mark.rest
def test_unequal_microbatches_need_sums():
    assert lesson.error_of_unequal("means", (32, 32)) < 1e-5
    assert lesson.error_of_unequal("sums", (32, 4)) < 1e-5
    assert lesson.error_of_unequal("means", (32, 4)) > 0.1
