"""Any features together: the steps of one device, or a refusal in words (`feature_pairs` has the table).

`pytest -m slow` crosses every two. JDP_TURN=1 (2, 3, ...) does so under other strategies and partitionings.
"""

import os

import pytest
from feature_pairs import FEATURES, check, pairs

TURN = int(os.environ.get("JDP_TURN", "0"))
QUICK = """
bf16 replica batch_norm accumulate ema
int8 pad wrt dropout eval
int8 scan_layers lora resume
bf16 model_axis accumulate clip_norm
offload scan_layers batch_norm resume
overlap dropout clip_norm pad
replica ema batch_norm dropout eval
pad wrt resume scan_layers
accumulate gather_rows
own_loop bf16 lora replica ema
own_loop int8 gather_rows model_axis
int8 model_axis wrt offload
int8 overlap lora
gather_rows eval
"""


@pytest.mark.parametrize("names", QUICK.split("\n")[1:-1])
def test_features_together_equal_one_device(names, tmp_path):
    check(tuple(names.split()), tmp_path)


def test_the_quick_ones_take_every_feature_twice():
    assert set(QUICK.split()) == set(FEATURES)
    assert all(QUICK.split().count(name) > 1 for name in FEATURES)


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(pairs()), ids="-".join)
def test_two_features_equal_one_device(pair, tmp_path):
    check(pair, tmp_path, TURN)
