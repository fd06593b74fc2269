"""Old gradients and the rates that they allow; the pace of the slowest device; bytes and weights of local steps."""

import math

import pytest
from load import load

lesson = load("staleness")
pytestmark = pytest.mark.usefixtures("scikit_learn")


@pytest.mark.parametrize("age", [1, 4])
def test_the_limit_is_where_convergence_stops(age):
    """x ← x − rate · x of `age` updates ago; fresh ones converge below a rate of 2."""

    def size(rate):
        path = [1.0] * (age + 1)
        for _ in range(2000):
            path.append(path[-1] - rate * path[-1 - age])
        return max(map(abs, path[-50:]))

    assert size(2 * 0.98 * lesson.limit(age)) < 0.1
    assert size(2 * 1.02 * lesson.limit(age)) > 10


@pytest.mark.rest
def test_old_gradients_need_a_lower_rate():
    """A rate that fresh ones learn with ends near chance, ln 10; with a low rate old ones are 8 of 100 updates late."""
    (low, high), (old_low, old_high) = lesson.sweep((0, 8), lesson.RATES[[0, 8]], 1, updates=100)
    assert high < low and old_high > 2
    assert old_low == pytest.approx(low, rel=0.1)


@pytest.mark.parametrize("devices", [2, 64])
def test_the_slowest_of_many_is_the_expected_maximum(devices):
    """Rényi 1953: a harmonic number; for a Pareto tail by the Beta function. 3,200 draws: 3 % is four deviations."""
    harmonic = sum(1 / i for i in range(1, devices + 1))
    assert lesson.pace("exponential tail", devices, 1) == pytest.approx(0.9 + 0.1 * harmonic, rel=0.03)
    largest = math.exp(math.lgamma(devices + 1) + math.lgamma(2 / 3) - math.lgamma(devices + 2 / 3))
    assert lesson.pace("Pareto tail, α = 3", devices, 1) == pytest.approx(0.9 + 0.2 * (largest - 1), rel=0.03)


def test_local_steps_hide_tails_not_slow_devices():
    tail, slow = ([lesson.pace(name, 64, local) for local in (1, 16, 0)] for name in list(lesson.TIMES)[2:])
    assert tail[0] > 1.5 > 1.3 > tail[1] > 1.1 and tail[2] == pytest.approx(1, abs=0.01)
    assert slow == [2, 2, pytest.approx(64 / 63.5)]


def test_slow_links_carry_weights_once_a_round():
    """A ring over 4 replicas sends 2 · 3/4 of the float32 parameters for 16 steps."""
    parameters = sum(leaf.size for leaf in lesson.init(0).values())
    assert lesson.slow_bytes("DiLoCo", 16) == 1.5 * 4 * parameters / (16 * lesson.INNER_ROWS)


@pytest.mark.rest
def test_rounds_of_four_steps_learn():
    assert lesson.train("SGD, mean", 4, samples=2048) < 1
