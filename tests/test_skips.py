"""In CI, a test that skips because a package is missing is an error that names the package."""

import textwrap

import pytest
import skips
from own_process import run_pytest

MODULES = {
    "test_inside.py": """
        import pytest

        def test_one():
            pytest.importorskip("no_such_package.part")
    """,
    "test_whole.py": """
        import pytest

        pytest.importorskip("no_such_package.part")

        def test_one(): ...
    """,
    "test_marked.py": """
        import pytest

        @pytest.mark.skipif(True, reason="no_such_package is not there")
        def test_one(): ...
    """,
    "test_allowed.py": """
        import pytest

        @pytest.mark.skipif(True, reason="root may write anywhere")
        def test_one(): ...

        @pytest.mark.xfail
        def test_two():
            raise ValueError
    """,
}


def pytest_on(folder, name, **environment):
    """Run pytest on one of `MODULES`."""
    (folder / name).write_text(textwrap.dedent(MODULES[name]))
    return run_pytest(folder, "-q", "-p", "skips", name, **environment)


@pytest.mark.parametrize("name", ["test_inside.py", "test_whole.py", "test_marked.py"])
def test_a_skip_for_a_missing_package_fails_in_ci(tmp_path, name):
    result = pytest_on(tmp_path, name, JDP_CI="1")
    assert result.returncode != 0
    assert "no_such_package" in result.stdout
    assert "in CI" in result.stdout


def test_elsewhere_it_is_a_skip(tmp_path):
    result = pytest_on(tmp_path, "test_inside.py", CI="false")
    assert result.returncode == 0
    assert "1 skipped" in result.stdout


def test_other_skips_and_expected_failures_stay(tmp_path):
    result = pytest_on(tmp_path, "test_allowed.py", CI="true")
    assert result.returncode == 0
    assert "1 skipped, 1 xfailed" in result.stdout


def test_the_package_is_named_with_the_command_that_installs_it():
    text = skips.refusal("could not import 'pyarrow.parquet': No module named 'pyarrow'")
    assert text is not None
    assert "pyarrow.parquet cannot be imported: pip install pyarrow, or the extra it belongs to" in text
    assert skips.refusal("could not import 'torch': No module named 'torch'") is None
