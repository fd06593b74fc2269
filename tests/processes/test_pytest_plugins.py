"""pytest's options and markers of this suite, each in a pytest of its own: skips in CI, tenths, default ids."""

import pytest
import tenth
from own_process import run_pytest

SKIPS = """
import pytest

def test_inside():
    pytest.importorskip("no_such_package.part")

@pytest.mark.skipif(True, reason="no_such_package is not there")
def test_marked(): ...

@pytest.mark.skipif(True, reason="root may write anywhere")
def test_allowed(): ...

@pytest.mark.xfail
def test_expected():
    raise ValueError
"""
WHOLE_FILE = 'import pytest\n\npytest.importorskip("no_such_package.part")\n'


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({"JDP_CI": "1"}, "1 failed, 1 skipped, 1 xfailed, 2 errors"),
        ({"CI": "true"}, "1 failed, 1 skipped, 1 xfailed, 2 errors"),
        ({"CI": "false"}, "4 skipped, 1 xfailed"),
    ],
)
def test_skips_for_missing_packages_fail_in_ci(variables, counts, tmp_path):
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    result = run_pytest(tmp_path, "-q", "-p", "skips", "--continue-on-collection-errors", **variables)
    assert counts in result.stdout


# Ten commits, one for each last digit, run every test once between them; time that is over skips, in words.

NAMES = [f"test_many.py::test_one[{number}]" for number in range(40)]
TEXT = """
import pytest

@pytest.mark.parametrize("number", range(40))
def test_one(number): ...
"""


def pytest_with(folder, *options):
    """Run pytest on `TEXT`."""
    (folder / "test_many.py").write_text(TEXT)
    return run_pytest(folder, "-v", "-p", "tenth", "-p", "skips", *options, "test_many.py", JDP_CI="1")


def test_a_commit_runs_the_tests_of_its_tenth(tmp_path):
    result = pytest_with(tmp_path, "--tenth", "c0ffee")
    assert "tenth: 0 of 0 to 9" in result.stdout  # 12648430
    ran = {line.partition(" ")[0] for line in result.stdout.splitlines() if " PASSED" in line}
    assert ran == {name for name in NAMES if tenth.tenth_with(name) == int("c0ffee", 16) % 10} != set()


def test_ten_tenths_are_all_tests():
    """crc32 is the same on every machine, where Python's own hash of a text is another in every process."""
    assert tenth.tenth_with(NAMES[0]) == 1
    assert {tenth.tenth_with(name) for name in NAMES} == {tenth.tenth_of(f"{number:x}") for number in range(90, 100)}


def test_skips_after_the_time_say_so(tmp_path):
    over = pytest_with(tmp_path, "--within", "0")
    assert over.returncode == 0
    assert "40 skipped" in over.stdout
    assert tenth.OVER in over.stdout


# Ids that `@pytest.mark.default_ids` names exist.


def test_an_id_that_was_renamed_is_an_error(tmp_path):
    text = '@pytest.mark.default_ids("one-*")\n@pytest.mark.parametrize("x", [1, 2], ids=["one-a", "two"])\n'
    (tmp_path / "test_ids.py").write_text(f"import pytest\n\n{text}def test_it(x): ...\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  rest\n  default_ids\n")
    options = ("-q", "-p", "markers", "-m", "not rest", "test_ids.py")
    assert "1 passed, 1 deselected" in run_pytest(tmp_path, *options).stdout
    (tmp_path / "test_ids.py").write_text(f"import pytest\n\n{text.replace('one-a', 'first')}def test_it(x): ...\n")
    assert "test_it has no id like ['one-*']" in run_pytest(tmp_path, *options).stdout
