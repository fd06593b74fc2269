"""What a notebook shows of an object: tables and pictures, drawn by `jdp.report.notebook`."""

from importlib import import_module


class Drawn:
    """An object that IPython, and what shows objects as it does, draws instead of writing its `repr`."""

    def _repr_html_(self) -> str:
        """Return HTML that stands alone, without scripts; no array is read for it, and nothing computed.

        `report` comes later in the order of packages: it is imported by name, when a notebook asks and not before.
        """
        return import_module("jdp.report.notebook").fragment(self)
