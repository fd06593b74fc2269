"""Fresh processes: what importing jdp and asking for help start, how a program ends, and output that nobody reads."""

import subprocess
import sys
import textwrap

import pytest
from own_process import python
from paths import ROOT

OPTIONAL = ("jax_cuda13_plugin", "jax_plugins", "nvidia", "libtpu", "pytest", "ruff")
FOR_THE_COMMAND_ONLY = ("tyro", "matplotlib", "tensorboardX", "pydantic")


def test_importing_starts_no_backend_nor_optional_dependency():
    """With the optional packages hidden it works all the same, and the heavier ones of the command line stay out."""
    program = f"""
        import sys

        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {OPTIONAL!r}:
                    raise ModuleNotFoundError(name, name=name)

        sys.meta_path.insert(0, Hide())
        import jdp

        assert "jax" not in sys.modules, "importing jdp alone takes no JAX"
        for name in dir(jdp):
            getattr(jdp, name)
        from jax._src import xla_bridge

        assert not xla_bridge.backends_are_initialized(), "a backend was started"
        taken = [name for name in {OPTIONAL + FOR_THE_COMMAND_ONLY!r} if name in sys.modules]
        assert taken == [], taken
        assert not [name for name in sys.modules if name.startswith(("jdp.cli", "jdp.experiment", "jdp.run"))]
    """
    result = python("-W", "error", "-c", textwrap.dedent(program))
    assert result.returncode == 0, result.stderr
    assert result.stdout == result.stderr == ""


def test_help_takes_no_jax():
    program = "import sys; from jdp.cli.main import main; main(['train', '--help']); sys.exit('jax' in sys.modules)"
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (0, "") and "--train.steps" in done.stdout


FULL = "error: the output cannot be written: No space left on device\n"
STREAMS = {
    "a reader that left": ("{} train --help | true", "", 141),
    "a reader that left a run": (
        "{} launch -n 1 -- sh -c 'sleep 0.1; echo row' | true",
        "jdp: stdout cannot be written (Broken pipe): the run goes on without it\n",
        0,
    ),
    "a full disk": ("{} --help > /dev/full", FULL, 2),
    "a full disk for a command's help": ("{} doctor --help > /dev/full", FULL, 2),
}


@pytest.mark.parametrize(("line", "said", "code"), STREAMS.values(), ids=STREAMS)
def test_what_stands_around_the_command_is_no_traceback(line, said, code):
    command = f"unset PYTHONUNBUFFERED; set -o pipefail; {line.format(f'{sys.executable} -m jdp')}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (code, said, "")


def test_an_abandoned_run_ends_in_silence():
    """Reading threads still busy when the program leaves: no hang, no warning, no trace."""
    program = (
        "import numpy as np; from jdp.data import global_batches\n"
        "batches = iter(global_batches([{'x': np.zeros(3)}] * 99, batch_size=4, seed=0)); next(batches)"
    )
    ended = python("-W", "error", "-c", program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


LEFT = """
import threading
import jax, numpy as np
import jdp

inside = threading.Event()
compute = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: jax.numpy.tanh(y @ y), x))
large = jax.block_until_ready(compute(np.ones((800, 800), np.float32)))


def batches():
    inside.set()
    jax.block_until_ready(compute(large))
    yield np.ones(1, np.float32)


feed = jdp.shard_batches(batches(), jdp.Plan(jdp.make_mesh(data=1), "ddp"))
inside.wait()
"""


def test_an_open_feed_does_not_abort_python():
    """Its thread may be inside JAX: if that comes back while Python ends, the process ends with 134."""
    done = python("-c", LEFT)
    assert (done.returncode, done.stderr) == (0, "")
