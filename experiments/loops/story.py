"""The command line of these programs: `[jdp launch -n 2 --] experiments/loops/NAME.py [ddp|zero1|zero2|zero3]`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jdp


def tell(train: Callable[[jdp.Plan], tuple[Any, Any]]) -> None:
    """Train under the strategy that the command line names, on this machine's GPUs or eight virtual CPU devices.

    Args:
        train: as in each program: plan -> (what it measured in each step, its models).
    """
    if "JDP_NUM_PROCESSES" not in os.environ:  # `jdp launch` says how many devices each process has
        jax.config.update("jax_num_cpu_devices", 8)
    jdp.initialize()
    plan = jdp.Plan(jdp.make_mesh(data=-1), *sys.argv[1:2], min_shard_size=0)  # 0: models as small as these are sharded
    measured, _ = train(plan)
    if jax.process_index():
        return
    print(plan)
    with np.printoptions(precision=4):
        for step, values in enumerate(measured):
            print(f"step {step}:", jax.tree.map(np.asarray, values))
