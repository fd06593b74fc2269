"""The wheel has jdp and the experiments it ships, and trains one of them in any folder, without the clone."""

import importlib.util
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest
from own_process import python
from paths import EXPERIMENTS, ROOT

import jdp

SMALL = "--train.steps 2 --optimizer.warmup_steps 1 --train.eval_batches 1 --model.layers 1 --model.width 16"
IMPORTED = "import jdp, pathlib, sys; assert pathlib.Path(jdp.__file__).is_relative_to(sys.argv[1]), jdp.__file__"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The folder of the unpacked wheel; without hatchling here, pip gets it from its index."""
    folder = tmp_path_factory.mktemp("wheel")
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *here, "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"jdp-{jdp.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def names(folder, pattern):
    return {path.relative_to(folder).as_posix() for path in folder.glob(pattern)}


def test_its_content(unpacked):
    """Every module, guide and template of jdp, and the experiments, and nothing else beside the metadata."""
    assert {path.name for path in unpacked.iterdir()} == {"jdp", f"jdp-{jdp.__version__}.dist-info"}
    for pattern in ("**/*.py", "**/*.md", "**/*.html", "base/*.toml", "**/*.txtpb", "**/*.mplstyle"):
        assert names(unpacked / "jdp", pattern) == names(ROOT / "jdp", pattern)
    assert (unpacked / "jdp" / "py.typed").is_file()
    shipped = unpacked / "jdp" / "experiment" / "shipped_files"
    assert names(shipped, "*") == names(EXPERIMENTS, "*.toml")
    for file in shipped.iterdir():
        assert file.read_bytes() == (EXPERIMENTS / file.name).read_bytes()


def test_its_metadata(unpacked):
    folder = unpacked / f"jdp-{jdp.__version__}.dist-info"
    metadata = Parser().parsestr((folder / "METADATA").read_text(encoding="utf-8"))
    assert (metadata["Version"], metadata["Requires-Python"]) == (jdp.__version__, ">=3.11")
    assert metadata["License-Expression"] == "Apache-2.0" and (folder / "licenses" / "LICENSE").is_file()
    assert (folder / "entry_points.txt").read_text().split() == ["[console_scripts]", "jdp", "=", "jdp.__main__:main"]


def test_a_name_is_read_from_the_wheel(unpacked, tmp_path):
    """A new file of a shipped experiment is as the clone writes it."""
    there = {"cwd": tmp_path, "PYTHONPATH": str(unpacked), "JAX_PLATFORMS": "cpu"}
    done = python("-c", IMPORTED, str(unpacked), **there)
    assert done.returncode == 0, done.stderr
    done = python("-m", "jdp", "new", "mine", "--from", "gpt2_124m", **there)
    assert done.returncode == 0, done.stderr
    assert "gpt2-124m" in (tmp_path / "mine.toml").read_text()
    done = python("-m", "jdp", "plan", "quick", **there)
    assert done.returncode == 2 and "did you mean quickstart? jdp ships continue_pretraining" in done.stderr


@pytest.mark.rest
def test_the_quickstart_trains_in_another_folder(unpacked, tmp_path):
    words = ["-m", "jdp", "train", "quickstart", *SMALL.split(), "--model.heads", "2"]
    done = python(*words, cwd=tmp_path, PYTHONPATH=str(unpacked), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss " in done.stdout
    assert (tmp_path / "runs" / "quickstart" / "summary.json").is_file()
