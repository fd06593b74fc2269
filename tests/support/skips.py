"""In CI a test may skip for the reasons listed here only: one that skips because a package is missing tests nothing.

CI is where the environment has CI or JDP_CI (`.ci/run` sets the latter). There such a skip is an error that names the
package: add it to the extra `test` in pyproject.toml, or its reason to `ALLOWED`.
"""

import os
import re

import pytest

ALLOWED = (
    "root may write anywhere",
    "this user may read everything",
    "this process may not mount a file system",
    "about the GPU of this machine",
    "about machines without an NVIDIA driver",
    "no target describes this GPU: .*",
    "no Chromium on PATH: apt-get install chromium",  # a program of the system: pip cannot install it
    "PR_SET_PDEATHSIG is Linux's",
    "no Slurm: apt-get install slurm-wlm munge .*",  # programs of the system, as the next
    "no Open MPI 4: apt-get install openmpi-bin",
    "a Slurm of this machine's own needs root.*",
    "two hosts on one machine need root .*",
    "this machine has no network namespaces: .*",
    "could not import 'torch'.*",  # 200 MB for a program and a test: its arrays are copied as NumPy's
    "the time given with --within is over",
    "the numbers that transformers gave are kept, .*",  # with torch, too large for `test`
)
"""Reasons, as regular expressions for the whole of them: what the machine is, or a package too large for `test`."""


def in_ci() -> bool:
    return any(os.environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "JDP_CI"))


def refusal(reason: str) -> str | None:
    """Return what is wrong with a skip in CI; None if its reason is allowed."""
    if any(re.fullmatch(allowed, reason, flags=re.DOTALL) for allowed in ALLOWED):
        return None
    if missing := re.match(r"could not import '([^']+)'", reason):
        fix = f"pip install {missing[1].partition('.')[0]}, or the extra it belongs to: pip install '.[test]'"
        return f"no test may skip in CI for a missing package; {missing[1]} cannot be imported: {fix}"
    return f"a test may skip in CI only for the reasons in skips.py; given {reason!r}: install what is missing"


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.outcome != "skipped" or hasattr(report, "wasxfail") or not in_ci():
        return
    *_, reason = report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
    if text := refusal(reason.removeprefix("Skipped: ")):
        report.outcome, report.longrepr = "failed", text


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    _refuse(report)
    return report
