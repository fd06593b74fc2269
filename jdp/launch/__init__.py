"""Processes: started as one cluster, watched, and started again when they fail.

supervisor   starts the processes of a machine, again and again; `restarts` decides whether that can help
processes    the processes of one attempt, with their `process_environment` and `output`
doctor/      the checks of `jdp doctor`
"""

from jdp.launch.process_environment import Nodes
from jdp.launch.supervisor import launch

__all__ = ["Nodes", "launch"]
