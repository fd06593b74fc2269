"""What importing jdp does, in a fresh process."""

import textwrap

from own_process import python


def test_modules_are_reached_through_the_package():
    program = "import jdp; jdp.export.export_safetensors, jdp.export.import_safetensors"
    result = python("-W", "error", "-c", program)
    assert result.returncode == 0, result.stderr


OPTIONAL = ("jax_cuda13_plugin", "jax_plugins", "nvidia", "libtpu", "pytest", "ruff")
FOR_THE_COMMAND_ONLY = ("tyro", "matplotlib", "tensorboardX", "pydantic")


def test_importing_starts_no_backend_nor_optional_dependency():
    """With the optional packages hidden it works all the same, and the heavier ones of the command line stay out."""
    program = f"""
        import sys

        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {OPTIONAL!r}:
                    raise ModuleNotFoundError(name, name=name)

        sys.meta_path.insert(0, Hide())
        import jdp

        assert "jax" not in sys.modules, "importing jdp alone takes no JAX"
        for name in dir(jdp):
            getattr(jdp, name)
        from jax._src import xla_bridge

        assert not xla_bridge.backends_are_initialized(), "a backend was started"
        taken = [name for name in {OPTIONAL + FOR_THE_COMMAND_ONLY!r} if name in sys.modules]
        assert taken == [], taken
        assert not [name for name in sys.modules if name.startswith(("jdp.cli", "jdp.experiment", "jdp.run"))]
    """
    result = python("-W", "error", "-c", textwrap.dedent(program))
    assert result.returncode == 0, result.stderr
    assert result.stdout == result.stderr == ""
