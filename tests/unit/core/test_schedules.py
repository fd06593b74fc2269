"""Learning rates for large batches: the published numbers."""

import numpy as np
import optax
import pytest

import jdp


@pytest.mark.parametrize(
    ("rule", "batch", "rate"),
    [
        ("linear", 8192, 3.2),  # Goyal et al. 2017: ResNet-50, 0.1 for 256, and 3.2 for 8k
        ("linear", 64, 0.025),
        ("sqrt", 8192, 0.1 * 32**0.5),
    ],
)
def test_the_rate_is_scaled_with_the_batch(rule, batch, rate):
    assert jdp.scaled_lr(0.1, base_batch=256, batch=batch, rule=rule) == pytest.approx(rate)


def test_the_warmup_climbs_in_equal_increments_and_stays():
    """Goyal et al. 2017, section 2.2: from 0.1 to 3.2 over five epochs, by a constant amount each iteration."""
    schedule = jdp.warmup(3.2, 5, start=0.1)
    np.testing.assert_allclose([schedule(i) for i in range(7)], [0.72, 1.34, 1.96, 2.58, 3.2, 3.2, 3.2], rtol=1e-6)


def test_a_schedule_goes_on_where_the_warmup_ends():
    decay = optax.cosine_decay_schedule(1.0, 10)
    schedule = jdp.warmup(decay, 4)
    np.testing.assert_allclose([schedule(i) for i in range(4)], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose([schedule(4 + i) for i in range(11)], [decay(i) for i in range(11)], rtol=1e-6)
