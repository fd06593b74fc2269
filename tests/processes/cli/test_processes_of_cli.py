"""What `jdp.cli` does in processes of its own."""

import subprocess
import sys

import pytest
from paths import ROOT


def test_help_takes_no_jax():
    program = "import sys; from jdp.cli.main import main; main(['train', '--help']); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "--train.steps" in done.stdout


STREAMS = {
    "a reader that left": ("{} train --help | true", "", 141),
    "a reader that left a run": (
        "{} launch -n 1 -- sh -c 'sleep 0.1; echo row' | true",
        "jdp: stdout cannot be written (Broken pipe): the run goes on without it\n",
        0,
    ),
    "a full disk": ("{} --help > /dev/full", "error: the output cannot be written: No space left on device\n", 2),
}


@pytest.mark.parametrize(("line", "said", "code"), STREAMS.values(), ids=STREAMS)
def test_what_stands_around_the_command_is_no_traceback(line, said, code):
    command = f"set -o pipefail; {line.format(f'{sys.executable} -m jdp')}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (code, said, "")
