"""Processes: started as one cluster, watched, and restarted after a failure.

supervisor   starts and restarts the processes of a machine; `restarts` decides whether a restart can help
processes    the processes of one attempt, with their `process_environment` and `output`
doctor/      the checks of `jdp doctor`
"""

from jdp.launch.process_environment import Nodes
from jdp.launch.supervisor import launch

__all__ = ["Nodes", "launch"]
