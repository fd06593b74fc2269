"""A stand-in for ptxas, NVIDIA's assembler: nothing that is compiled for described GPUs is ever run.

XLA starts ptxas for each of a program's kernels, dozens of processes that are two fifths of the time of compiling. The
program as text and its memory, all that jdp reads, are settled before. `conftest.py` leaves the real one where there
is a GPU.
"""

import importlib.util
import os
import shutil
from pathlib import Path

REAL = "JDP_TESTS_REAL_CUDA"  # where the real one is, for the workers


def stand_in(folder: Path) -> None:
    """Make `folder` a CUDA toolkit with nothing but an assembler that writes empty files; jax looks at CUDA_ROOT."""
    real = None if REAL in os.environ else _toolkit()
    if real is None:
        return
    program = folder / "bin" / "ptxas"  # XLA calls it as `ptxas FILE -o FILE OPTION ...`
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec "{real}/bin/ptxas" --version\n: > "$3"\n')
    program.chmod(0o755)
    os.environ[REAL], os.environ["CUDA_ROOT"] = str(real), str(folder)


def _toolkit() -> Path | None:
    """Where jax would look: CUDA_ROOT, else NVIDIA's Python packages; else what is installed."""
    if "CUDA_ROOT" in os.environ:
        folders = [Path(os.environ["CUDA_ROOT"])]
    else:
        folders = [Path(folder) for name in ("cu13", "cuda_nvcc") for folder in _package(f"nvidia.{name}")]
        if installed := shutil.which("ptxas"):
            folders.append(Path(installed).parent.parent)
    return next((folder for folder in folders if (folder / "bin" / "ptxas").is_file()), None)


def _package(name: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return []
    return list(spec.submodule_search_locations or ()) if spec else []
