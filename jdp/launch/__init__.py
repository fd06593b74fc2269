"""Processes: started as one cluster, watched, and started again when they fail.

supervisor.py  starts the processes of a machine, again and again; `restarts.py` decides whether that can help
processes.py   the processes of one attempt; `process_environment.py` what each learns, `output.py` where its lines go
rendezvous.py  server of the supervisors of several machines; `decisions.py` asks it, `messages.py` carries messages
"""

from jdp.launch.rendezvous import Nodes
from jdp.launch.supervisor import launch

__all__ = ["Nodes", "launch"]
