"""The configurations of models and the sizes by name. They need no JAX, so `jdp train --help` answers at once."""
