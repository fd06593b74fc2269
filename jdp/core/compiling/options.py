"""Options of XLA's compiler as a value: "auto", "default", "overlap", or a table of options.

`Compiler.of` checks the value; `Compiler.for_mesh` resolves it for the devices of a step. Options that their compiler
does not know are left out and reported by name, because options come and go with jax's versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, get_args

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.words import CompilerPreset, is_integer, nearest

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jdp.core.types import Device

CompilerValue = bool | int | float | str
CompilerOptions = CompilerPreset | Mapping[str, CompilerValue]

_JOINED = 2**30
"""Bytes: this limit joins all of a layer's collectives of one kind. XLA's own, 30 MiB, leaves several, and its
scheduler assumes that each lasts as long as a few matrix products."""
_THRESHOLDS = tuple(
    f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
PRESETS: dict[CompilerPreset, Mapping[str, CompilerValue]] = {
    "default": {},
    "overlap": {
        # Starts collectives as early and awaits them as late as possible. It is XLA's default for H100, not for A100.
        # llama_8b_zero3 (a100:8x8, one sequence a GPU, simulated with jax 0.10.2) hides 50 % of its communication with
        # both entries and 24 % without, and a step takes 5 % less.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # gpt_1b (h100:8x8, simulated with jax 0.10.2) hides 91 % instead of 71 % under zero3, and of 76 % under ddp.
        **dict.fromkeys(_THRESHOLDS, _JOINED),
    },
}
"""Preset -> its options; the mesh decides which of these "auto" is (`Compiler.on`). CPU devices share cores, and the
compiler for TPUs overlaps by default, so there are no options for them."""

_PREFIXES = {"xla_gpu_": "gpu", "xla_cpu_": "cpu", "xla_tpu_": "tpu"}
_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_WRONG = re.compile(r"While setting option (\S+), '.*' is not a valid (\w+) value")
_KINDS = {"bool": "true or false", "string": "text", "float": "a number", "double": "a number", "enum": "a known word"}


@dataclass(frozen=True)
class Compiler:
    """Options of XLA's compiler, not yet resolved for devices."""

    preset: CompilerPreset | Literal[""] = "default"  # "" for custom options
    options: tuple[tuple[str, CompilerValue], ...] = ()  # custom ones, sorted
    buckets: int | None = None  # bytes up to which the compiler for GPUs joins collectives of one kind

    @staticmethod
    def of(given: Any, buckets: int | None = None) -> Compiler:
        if buckets is not None:
            if not is_integer(buckets) or buckets < 1:
                raise UserError(f"buckets is a number of bytes, at least 1; given {buckets!r}. Give 25 * 2**20.")
            return replace(Compiler.of(given), buckets=buckets)
        if isinstance(given, Compiler):
            return given
        words: tuple[CompilerPreset, ...] = get_args(CompilerPreset)
        if isinstance(given, str) and given in words:
            return Compiler(next(word for word in words if word == given))
        if not isinstance(given, Mapping):
            presets = ", ".join(f'"{name}"' for name in words)
            hint = nearest(str(given), words) or ". Write one of these."
            raise UserError(
                f"The compiler's options are {presets}, or a table of XLA's options; given {repr(given)[:100]}{hint}"
            )
        table = dict[Any, Any](given)
        for name, value in table.items():
            if not isinstance(name, str) or not re.fullmatch(r"xla_\w{1,200}", name):
                raise UserError(f"Names of compiler options begin with xla_; given {str(name)[:100]!r}. Correct it.")
            if not isinstance(value, bool | int | float | str):
                rule = "A compiler option is true or false, a number or text"
                raise UserError(f"{rule}; given {name} = {str(value)[:100]}. Correct it.")
        return Compiler("", tuple(sorted(table.items()))) if table else Compiler()

    @property
    def settled(self) -> dict[str, CompilerValue]:
        """Its options, if it is not "auto"."""
        options = {**PRESETS.get(self.preset, {})} if self.preset else dict(self.options)
        return options | ({} if self.buckets is None else dict.fromkeys(_THRESHOLDS, self.buckets))

    @property
    def value(self) -> CompilerOptions:
        """The argument for `of` that makes this: a preset's name, or option -> value."""
        return self.preset or dict(self.options)

    def on(self, mesh: Mesh) -> Compiler:
        """Return the same with "auto" settled: "overlap" on several GPUs without a `model` axis, else "default".

        Simulated with jax 0.10.2, gpt_1b zero3 on h100:8x8 takes 69.8 ms with "overlap" and 90.7 without. On h100:1x8
        no step of GPT-2 or gpt_1b takes longer. With a `model` axis XLA's defaults hide more (experiments/LOG.md).
        """
        if self.preset != "auto":
            return self
        from jdp.core.sharding.mesh import own_axes

        is_of_gpus = mesh.devices.flat[0].platform == "gpu" and mesh.size > 1
        is_sharded = any(mesh.shape[axis] > 1 for axis in own_axes(mesh))
        return replace(self, preset="overlap" if is_of_gpus and not is_sharded else "default")

    def for_mesh(self, mesh: Mesh) -> dict[str, CompilerValue]:
        """Return the options for the mesh's devices; those of other platforms or unknown are left out and reported."""
        import jax

        devices: list[Device] = list(mesh.devices.flat)
        device = next((one for one in devices if one.process_index == jax.process_index()), devices[0])
        options = self.on(mesh).settled
        foreign = [name for name in options if _PREFIXES.get(name[:8], device.platform) != device.platform]
        if self.buckets is not None and device.platform != "gpu":
            notice(f"buckets is for XLA's compiler for GPUs: nothing is set on {device.platform}")
        elif foreign and self.preset:
            notice(f'compiler = "{self.preset}" has no option for {device.platform}: nothing is set')
        elif foreign:
            notice(f"compiler options of another platform, left out on {device.platform}: {', '.join(foreign)}")
        return _known(device, tuple((name, value) for name, value in options.items() if name not in foreign))


DEFAULT = Compiler()


@lru_cache(maxsize=256)
def _accepted(device: Device, options: tuple[tuple[str, CompilerValue, type], ...]) -> str:
    """Compile a small program with these options; return the compiler's error, or "". It takes 0.1 s.

    The types are arguments because 1 equals True.
    """
    import jax
    from jax.sharding import SingleDeviceSharding

    from jdp.core.compiling.persistent_cache import without_kept_programs

    def trial() -> str:
        scalar = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
        is_described = not device.addressable_memories()
        try:
            with without_kept_programs() if is_described else nullcontext():
                values = {name: value for name, value, _ in options}
                jax.jit(lambda x: x, compiler_options=values).lower(scalar).compile()
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(1) as other:  # a new thread has no mesh in its context, and traces nothing
        return other.submit(trial).result()


def _known(device: Device, options: tuple[tuple[str, CompilerValue], ...]) -> dict[str, CompilerValue]:
    """Return the options that the device's compiler knows. Raises ValueError for a value that it refuses."""
    while options and (error := _accepted(device, tuple((*option, type(option[1])) for option in options))):
        if wrong := _WRONG.search(error):
            name, kind = wrong.groups()
            takes, given = _KINDS.get(kind, "a whole number"), dict(options)[name]
            raise UserError(f"The compiler option {name} takes {takes}; given {given!r}. Change it, or leave it out.")
        unknown = _UNKNOWN.search(error)
        if unknown is None:
            names = ", ".join(name for name, _ in options)
            raise UserError(f"The compiler refuses the options {names}: {error.splitlines()[0]}")
        notice(f"XLA of jax {version('jax')} has no compiler option {unknown[1]} on {device.platform}: it is left out")
        options = tuple((name, value) for name, value in options if name != unknown[1])
    return dict(options)
