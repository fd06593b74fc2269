"""Every test sees eight virtual CPU devices, whatever the machine has, and no GPU plugin starts.

What the tests compile for other targets is kept for the length of the run, in a folder of its own.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from importlib import metadata
from pathlib import Path

import assembler

os.environ["JAX_PLATFORMS"] = "cpu"
# An eighth of the compile time; what XLA's own passes do - partitioning, fusion, scheduling - stays as it is. One LLVM
# module a program, one thread for GPUs' kernels: the workers share the cores already.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_gpu_force_compilation_parallelism=1"
)
if metadata.version("jaxlib").startswith("0.10."):  # later ones have no such flag, and end the process for it
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"  # MLIR's way from a fused loop to LLVM

# Processes that tests start would each compile jdp's sources again, an eighth of the time of a `jdp train`.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if "JDP_CACHE_DIR" not in os.environ:  # workers share the one that pytest itself makes
    os.environ["JDP_CACHE_DIR"] = tempfile.mkdtemp(prefix="jdp-tests-")
    atexit.register(shutil.rmtree, os.environ["JDP_CACHE_DIR"], ignore_errors=True)
    os.environ["HF_HOME"] = f"{os.environ['JDP_CACHE_DIR']}/hf"  # what `datasets` keeps
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # in programs of tests too

if not Path("/proc/driver/nvidia").exists():  # where there is a GPU, programs run on it
    assembler.stand_in(Path(os.environ["JDP_CACHE_DIR"], "assembler"))


from jdp.base.machine import use_cpu_devices

use_cpu_devices(8)

for ignored, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) == signal.SIG_IGN:  # `nohup` and `&` do that, and processes of the tests inherit it
        signal.signal(ignored, usual)

# A tenth of the time otherwise goes into looking for cycles: tracing makes millions of objects that no cycle holds.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish() -> None:
    """What collecting made stays until the end: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()


# Hooks with a file each: the markers `rest` and `aot`; in CI, a skip for a missing package is an
# error; files of tests are handed to workers whole; programs are kept for other tests where they run whole commands;
# servers of S3 and of Google's storage; fixtures of several files; a tenth of the tests.
pytest_plugins = (
    "checked_pictures",
    "markers",
    "skips",
    "workers",
    "kept_programs",
    "storage_servers",
    "shared_fixtures",
    "tenth",
    "guide_folders",
)
