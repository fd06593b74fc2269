"""The command line of these programs: `[jdp launch -n 2 --] experiments/loops/NAME.py [ddp|zero1|zero2|zero3]`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jdp


def tell(train: Callable[[jdp.Plan], tuple[Any, Any]]) -> None:
    """Train under the strategy on the command line, on this machine's GPUs or eight virtual CPU devices.

    Args:
        train: a program's function, plan -> (the measurements of each step, its models).
    """
    if "JDP_NUM_PROCESSES" not in os.environ:  # `jdp launch` sets the number of devices
        jax.config.update("jax_num_cpu_devices", 8)
    jdp.initialize()
    plan = jdp.Plan(jdp.make_mesh(data=-1), *sys.argv[1:2], min_shard_size=0)  # 0: shard these small models
    measured, _ = train(plan)
    if jax.process_index():
        return
    print(plan)
    with np.printoptions(precision=4):
        for step, values in enumerate(measured):
            print(f"step {step}:", jax.tree.map(np.asarray, values))
