"""Any two features together: the steps of one device, or a refusal in words (`feature_pairs` has the table)."""

import pytest
from feature_pairs import FEATURES, check, pairs

QUICK = ()


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.slow
def test_a_feature_alone_equals_one_device(feature, tmp_path):
    check((feature,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(pairs()), ids="-".join)
def test_two_features_equal_one_device(pair, tmp_path):
    check(pair, tmp_path)
