"""An experiment file: its keys, its checks, and the objects that it describes.

`file.py` reads and validates it, `schema/` has its keys, the other modules make the objects.
"""

from jdp.experiment.file import ExperimentError as ExperimentError
from jdp.experiment.file import check_for_devices as check_for_devices
from jdp.experiment.file import describe as describe
from jdp.experiment.file import from_table as from_table
from jdp.experiment.file import load as load
from jdp.experiment.file import mesh_sizes as mesh_sizes
from jdp.experiment.file import to_toml as to_toml
