"""Ten commits, one for each last digit, run every test once between them; time that is over skips, in words."""

import pytest
import tenth
from own_process import run_pytest

NAMES = [f"test_many.py::test_one[{number}]" for number in range(40)]
TEXT = """
import pytest

@pytest.mark.parametrize("number", range(40))
def test_one(number): ...

def test_that_fails():
    assert False
"""


def pytest_with(folder, *options):
    """Run pytest on `TEXT`."""
    (folder / "test_many.py").write_text(TEXT)
    return run_pytest(folder, "-v", "-p", "tenth", "-p", "skips", *options, "test_many.py", JDP_CI="1")


def test_a_commit_runs_the_tests_of_its_tenth(tmp_path):
    result = pytest_with(tmp_path, "--tenth", "c0ffee", "-k", "test_one")
    assert "tenth: 0 of 0 to 9" in result.stdout  # 12648430
    ran = {line.partition(" ")[0] for line in result.stdout.splitlines() if " PASSED" in line}
    assert ran == {name for name in NAMES if tenth.tenth_with(name) == int("c0ffee", 16) % 10} != set()


def test_ten_tenths_are_all_tests_and_no_other_process_parts_them_otherwise():
    """crc32 is the same on every machine, where Python's own hash of a text is another in every process."""
    assert tenth.tenth_with(NAMES[0]) == 1
    assert {tenth.tenth_with(name) for name in NAMES} == {tenth.tenth_of(f"{number:x}") for number in range(90, 100)}


def test_time_that_is_over_skips_in_words_and_a_failure_before_fails(tmp_path):
    over = pytest_with(tmp_path, "--within", "0")
    assert over.returncode == 0
    assert "41 skipped" in over.stdout
    assert tenth.OVER in over.stdout
    assert pytest_with(tmp_path, "--within", "1000").returncode == 1


def test_what_is_no_commit_is_refused(tmp_path):
    result = pytest_with(tmp_path, "--tenth", "HEAD")
    assert result.returncode == 4
    assert "argument --tenth: invalid" in result.stderr
    with pytest.raises(ValueError, match="takes a commit's hash; given 'HEAD'"):
        tenth.tenth_of("HEAD")
