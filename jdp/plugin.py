"""One's own model, data set, loss or optimizer, by a name in experiment files: `--plugin my_package`."""

from jdp.experiment.plugins import PluginError as PluginError
from jdp.experiment.plugins import register_dataset as register_dataset
from jdp.experiment.plugins import register_loss as register_loss
from jdp.experiment.plugins import register_model as register_model
from jdp.experiment.plugins import register_optimizer as register_optimizer
