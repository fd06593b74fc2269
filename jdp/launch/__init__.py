"""Processes: started as one cluster, watched, and started again when they fail.

supervisor.py  starts the processes of a machine, again and again; `restarts.py` decides whether that can help
gang.py        the processes of one attempt; `places.py` what each learns, `output.py` where its lines go
rendezvous.py  where the supervisors of several machines meet; `leaders.py` asks it, `wire.py` carries the messages
progress.py    how a run tells its supervisor that it has come further
"""

from jdp.launch.rendezvous import Nodes
from jdp.launch.supervisor import launch

__all__ = ["Nodes", "launch"]
