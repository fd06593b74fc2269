"""Processes: started as one cluster, watched, and restarted after a failure.

supervisor   starts the processes of a machine, and decides whether a restart can help
events       the log of events of each process, and of each supervisor
processes    the processes of one attempt, with their environment; `output` has their lines and log files
doctor       the checks of `jdp doctor`
"""

from jdp.launch.processes import Nodes
from jdp.launch.supervisor import launch

__all__ = ["Nodes", "launch"]
