"""What `jdp.data` does in processes of its own."""

from own_process import python


def test_an_abandoned_run_ends_in_silence():
    """Reading threads still busy when the program leaves: no hang, no warning, no trace."""
    program = (
        "import numpy as np; from jdp.data import global_batches\n"
        "batches = iter(global_batches([{'x': np.zeros(3)}] * 99, batch_size=4, seed=0)); next(batches)"
    )
    ended = python("-W", "error", "-c", program, timeout=60)
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
