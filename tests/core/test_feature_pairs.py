"""Any features together: the steps of one device, or a refusal in words (`feature_pairs` has the table).

`pytest -m slow` crosses every two. JDP_TURN=1 (2, 3, ...) does so under other strategies and partitionings.
"""

import os

import pytest
from feature_pairs import FEATURES, check, pairs

TURN = int(os.environ.get("JDP_TURN", "0"))


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_alone_equals_one_device(feature, tmp_path):
    check((feature,), tmp_path, TURN)


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(pairs()), ids="-".join)
def test_two_features_equal_one_device(pair, tmp_path):
    check(pair, tmp_path, TURN)
