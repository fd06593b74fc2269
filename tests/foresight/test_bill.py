"""Days and money of a number of tokens: the sum, its range, its words, and what is refused."""

import pytest

from jdp.base.chips import GPUS
from jdp.cli import main as cli
from jdp.foresight.cost.bill import Bill, format_amount, format_days


def bill(**changed):
    given = {"tokens": 1e12, "unit": "tokens", "tokens_per_step": 1 << 20, "step_seconds": 0.5, "devices": 64}
    return Bill(**{**given, **changed})


def test_the_sum():
    one = bill(price=2.5, error=0.22)
    assert one.steps == 953_675  # ⌈10^12 / 2^20⌉
    assert one.seconds == 953_675 / 2
    assert one.device_hours == pytest.approx(64 * 953_675 / 7200)
    assert one.money == 2.5 * one.device_hours
    found = one.to_json()
    assert found["days"] == pytest.approx(5.519, abs=1e-3)
    assert found["seconds_range"] == [one.seconds / 1.22, one.seconds * 1.22]
    assert found["money_range"] == [one.money / 1.22, one.money * 1.22]


def test_the_words_have_the_range_and_its_source():
    words = str(bill(price=2.5, error=0.22))
    assert words.startswith(
        "1T tokens are 953,675 steps: 5.52 days (4.52 days to 6.73 days) and 21,200 (17,400 to 25,900), for 8,480 "
        "device-hours at 2.5 each. The range: foreseen times of published runs are off by 22 % at most."
    )
    words = str(bill())
    assert "5.52 days, 8,480 device-hours. How far off that may be is not known" in words
    assert bill().to_json()["money"] is None and bill(price=1.0).to_json()["money_range"] is None


def test_failures_make_it_longer():
    whole, part = bill(price=1.0), bill(price=1.0, goodput=0.8)
    assert part.seconds == pytest.approx(whole.seconds / 0.8) and part.money == pytest.approx(whole.money / 0.8)
    assert "no failures" in str(whole) and "80 % of the time" in str(part)


def test_three_digits_and_no_more():
    assert [format_amount(each) for each in (3.14159, 99.96, 1234.5, 1_239_999, 5e18)] == [
        "3.14",
        "100",
        "1,230",
        "1,240,000",
        "5e+18",
    ]
    assert [format_days(each) for each in (90.0, 7200.0, 86400.0, 86400 * 1234.0)] == [
        "1.5 min",
        "2 h",
        "1 day",
        "1,230 days",
    ]


def test_the_error_is_the_one_that_is_stated():
    """One number in the words that every plan notes and in the range."""
    for chip in GPUS.values():
        assert (chip.time_error is None) == ("not compared" in chip.compared_with)
        assert chip.time_error is None or f"all within {100 * chip.time_error:.0f} %" in chip.compared_with


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--tokens", "nan"), "--tokens takes a whole number from 1 to 10^18; given nan"),
        (("--tokens", "0"), "given 0: write --tokens 1e12"),
        (("--tokens", "1.5"), "given 1.5"),
        (("--tokens", "1e19"), "given 1e+19"),
        (("--price", "2"), "--price goes with --tokens"),
        (("--tokens", "1e12", "--price", "-1"), "--price takes what an hour of one device costs"),
        (("--tokens", "1e12", "--price", "inf"), "given inf: write --price 2.5"),
        (("--tokens", "1e12", "--tune", "--target", "h100:1x8"), "--tune goes without --tokens"),
        (("--tokens", "1e12", "--table", "7e9:8"), "given --tokens too: remove it"),
    ],
)
def test_what_cannot_be_is_one_error(given, expected, capfd):
    """Before the experiment is read: the file is not there."""
    file = () if "--table" in given else ("nowhere.toml",)
    assert cli.main(["plan", *file, *given]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and expected in err
