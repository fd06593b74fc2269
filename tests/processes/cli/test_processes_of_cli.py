"""What `jdp.cli` does in processes of its own."""

import os
import subprocess
import sys

import pytest
from paths import ROOT
from tiny_experiment import SMALL


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def jdp_command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "jdp", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_takes_no_jax():
    program = "import sys; from jdp.cli.main import main; main(['train', '--help']); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "--train.steps" in done.stdout


def test_the_real_command_says_a_mistake_once(file):
    done = jdp_command("train", file, "--devices", "3", JAX_PLATFORMS="cpu")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: train.batch_size must divide by data=3 × train.accumulate=1 = 3")
    assert done.stderr.count("\n") == 1


STREAMS = {
    "a reader that left": ("{} --help | true", "", 141),
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
