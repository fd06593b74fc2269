"""Processes: started as one cluster, watched, and started again when they fail.

supervisor   starts the processes of a machine, again and again; `restarts` decides whether that can help
processes    the processes of one attempt, with their `process_environment` and `output`; `standby` has the next
             attempt's ready, `temporary_folder` lasts for all
rendezvous   the server of the supervisors of several machines; `decisions` asks it
messages     signed with a `secret`, checked by `message_fields`; `door` keeps strangers from costing anything
doctor/      the checks of `jdp doctor`
"""

from jdp.launch.rendezvous import Nodes
from jdp.launch.supervisor import launch

__all__ = ["Nodes", "launch"]
