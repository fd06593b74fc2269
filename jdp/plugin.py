"""Custom models, data sets, losses and optimizers, by a name in experiment files: `--plugin my_package`."""

from jdp.experiment.plugins import PluginError, register_dataset, register_loss, register_model, register_optimizer

__all__ = [
    "PluginError",
    "register_dataset",
    "register_loss",
    "register_model",
    "register_optimizer",
]
