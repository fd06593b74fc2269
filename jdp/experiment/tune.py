"""`jdp plan --tune` on an experiment file: the choices, and the search over them.

No choice changes the training: the global batch, its order, the optimizer and its rate stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jdp.base.disk_cache import Cache
from jdp.base.toml import toml_value
from jdp.core.compiling.options import PRESETS, Compiler
from jdp.core.sharding.axes import DATA, batch_unit
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, check_for_devices, load
from jdp.experiment.plan import candidates_of, search_meshes
from jdp.experiment.remat import ladder
from jdp.experiment.schema.experiment import NONE, Experiment
from jdp.foresight.advice.tune import Choice, Dimension, Trial, Tuned, Way, name_of, overrides_of, search
from jdp.foresight.forecast import Estimate
from jdp.foresight.foresee import ZERO3, count_batch, estimate
from jdp.foresight.targets.relocate import candidate_name, hybrid_axes
from jdp.foresight.targets.resolve import Target
from jdp.models import GPTConfig, ViTConfig
from jdp.models.configs.choices import POLICIES

SCHEDULER = {"xla_gpu_enable_latency_hiding_scheduler": True}
PIPELINED = {f"xla_gpu_enable_pipelined_{kind}": True for kind in ("all_gather", "all_reduce", "reduce_scatter")}
DOUBLED = {"xla_gpu_enable_while_loop_double_buffering": True}
COMPILERS: dict[str, Mapping[str, bool | int]] = {
    "pipelined": SCHEDULER | PIPELINED,
    "doubled": SCHEDULER | DOUBLED,
}
"""Options for GPUs that are tried beside the presets: collectives moved into the round of a loop before or after; two
rounds of a loop in one, with buffers of their own. Several collectives at once
(xla_gpu_experimental_parallel_collective_overlap_limit) would often win as simulated and are left out: XLA had them
race on streams of their own (openxla/xla, pull request 40520), and no run on several GPUs has shown them right. Left
out too is one loop's double buffering by `set_xla_metadata(_xla_loop_unroll_strategy="double-buffer")` (openxla/xla,
pull request 43468): it reaches the loop, and the compilers of jax 0.10.2 and 0.12.0.1 do nothing with it."""
TRITON_GEMM = "xla_gpu_enable_triton_gemm"
MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
"""Percent of a device's memory that XLA's scheduler and its rematerialisation keep to. They count the stacks of scanned
layers twice (llama of 70 B, remat "dots_except_mlp": 179 GiB of 108), and near the limit compute products again and
wait for collectives."""
ROOM = 200
SENT = "simulated with collectives at published rates, which were compared with whole published runs only"
OVERLAPPED = "simulated, and how kernels and collectives overlap was compared with no run on several GPUs"
PRODUCTS = "simulated with Triton's and cuBLAS' products timed alike, so only what is fused or computed twice counts"
COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
UNTIMED = {
    "": "no CUDA graphs: they are recorded anew where buffers move",
    "FUSION,CUSTOM_CALL": "CUDA graphs of kernels alone",
}
"""Values of `COMMAND_BUFFER` that are worth a try on the machine, as the simulation does not see them, and why."""
MOST_UNROLLED = 48
"""More layers than this are not tried unrolled: compiling them takes minutes."""


@dataclass(frozen=True)
class Tuning:
    """A search for the fastest way to run an experiment.

    Attributes:
        file: the experiment's.
        overrides: the keys that were given on the command line, which stay as they are.
        target: the devices.
        strategies, accumulate, remats: the choices; None: all.
        axes: strategies on other meshes are tried too, those that `search_meshes` keeps.
    """

    file: Path
    overrides: Mapping[str, str]
    target: Target
    strategies: Sequence[str]
    accumulate: Sequence[int] | None = None
    remats: Sequence[str] | None = None
    axes: bool = False

    def experiment(self, way: Way) -> Experiment:
        """Return the experiment with a way's keys. Raises ExperimentError for keys that do not go together."""
        experiment = load(self.file, {**self.overrides, **overrides_of(way)})
        check_for_devices(experiment, len(self.target.devices))
        return experiment

    def changes(self, key: str, text: str) -> bool:
        """Return True if the experiment has another value at `key` than `text` gives it."""
        return load(self.file, self.overrides) != load(self.file, {**self.overrides, key: text})

    def search(
        self,
        *,
        minutes: float,
        cache: bool = True,
        progress: Callable[[str], None] = lambda what: None,
    ) -> Tuned:
        """Search for the fastest way that fits."""
        store, end, dimensions = Cache.usual(cache), time.monotonic() + 60 * minutes, self.dimensions()

        def evaluate(way: Way, best: Trial | None) -> Estimate | None:
            try:
                experiment = self.experiment(way)
            except ExperimentError:
                if best is None:
                    raise
                return None
            progress(name_of(way) if best is None else f"{name_of(way)} (best so far: {best})")
            try:
                return self._estimate(experiment, store)
            except ValueError as error:
                if best is None:
                    raise
                return Estimate(experiment.strategy, experiment.train.accumulate, None, error=str(error))

        return search(dimensions, evaluate, more=lambda: time.monotonic() < end)

    def _estimate(self, experiment: Experiment, cache: Cache | None) -> Estimate:
        """Compile an experiment as it is. Raises ValueError if it cannot be lowered for the target."""
        strategies, accumulate = [experiment.strategy], [experiment.train.accumulate]
        [candidate] = candidates_of(experiment, self.target, strategies=strategies, accumulate=accumulate, hybrid=False)
        found = estimate(candidate, self.target, tokens=count_batch(candidate.batch)[0], cache=cache)
        return replace(found, remat=getattr(experiment.model, "remat", None))

    def dimensions(self) -> list[Dimension]:
        """Return the choices, beginning with the experiment's own, or the nearest to it that works."""
        own = load(self.file, self.overrides)
        return [
            self._strategies(own),
            self._remats(own),
            self._accumulate(own),
            self._overlaps(own),
            self._compilers(own),
            self._option(own, TRITON_GEMM, False, PRODUCTS),
            self._option(own, MEMORY_LIMIT, ROOM, OVERLAPPED),
            self._scans(own),
        ]

    def untimed(self, best: Trial) -> list[tuple[str, str]]:
        """Return (line of the file, why) of options that the simulation does not see, beside those of a trial."""
        options = self._compiler(self.experiment(best.way)).settled
        if self.target.devices[0].platform != "gpu" or COMMAND_BUFFER in options:
            return []
        return [(f"compiler = {toml_value({**options, COMMAND_BUFFER: value})}", why) for value, why in UNTIMED.items()]

    def _is_given(self, key: str) -> bool:
        return any(given == key or given.startswith(f"{key}.") for given in self.overrides)

    def _strategies(self, own: Experiment) -> Dimension:
        names = sorted(self.strategies, key=lambda name: name != own.strategy)
        basis = SENT if len(self.target.devices) > 1 else ""
        choices = [Choice(name, (("strategy", name),), basis=basis) for name in names]
        for name, axes in self._other_meshes(own):
            sizes = ((f"mesh.{axis}", str(size)) for axis, size in axes.items())
            choices.append(Choice(candidate_name(name, 1, None, axes), (("strategy", name), *sizes), basis=basis))
        return Dimension(tuple(choices))

    def _other_meshes(self, own: Experiment) -> list[tuple[str, Mapping[str, int]]]:
        """Return strategies on other meshes. Raises ExperimentError if the mesh does not fit, or may not change."""
        if self.axes:
            counts = [own.train.accumulate]
            search = search_meshes(own, self.target, strategies=self.strategies, accumulate=counts)
            return [(way.strategy, way.axes) for way in search.kept]
        if ZERO3 not in self.strategies or own.mesh != {DATA: -1}:
            return []
        state = Assembly.on_devices(own, list(self.target.devices)).abstract_state()
        axes = hybrid_axes(self.target, state)
        return [(ZERO3, axes)] if axes else []

    def _remats(self, own: Experiment) -> Dimension:
        config = own.model.config
        is_auto = bool(policies := ladder(own))
        if not isinstance(config, GPTConfig | ViTConfig) or (self._is_given("model.remat") and not is_auto):
            return NOTHING
        first = policies[0] if is_auto else config.remat or NONE
        names = dict.fromkeys((first, *(self.remats or (NONE, *POLICIES))))
        return Dimension(tuple(Choice(f"remat={name}", (("model.remat", name),)) for name in names))

    def _accumulate(self, own: Experiment) -> Dimension:
        """Return the numbers of microbatches that divide a device's rows. Raises ExperimentError if none does."""
        if self._is_given("train.accumulate"):
            check_for_devices(own, len(self.target.devices))
            return NOTHING
        bare = own.model_copy(update={"train": own.train.model_copy(update={"accumulate": 1})})
        unit = batch_unit(check_for_devices(bare, len(self.target.devices)), local_steps=own.local_steps.steps or 1)
        rows = own.train.batch_size // unit.rows
        asked = self.accumulate or (own.train.accumulate, *(2**power for power in range(rows.bit_length())))
        counts = sorted({count for count in asked if rows % count == 0}) or [1]
        start = max((i for i, count in enumerate(counts) if count <= own.train.accumulate), default=0)
        choices = (Choice(f"K={count}" * (count > 1), (("train.accumulate", str(count)),)) for count in counts)
        return Dimension(tuple(choices), start, ordered=True)

    def _overlaps(self, own: Experiment) -> Dimension:
        """Return the other values of `overlap`, where layers' collectives can overlap with anything."""
        if len(self.target.devices) == 1 or self.target.devices[0].platform == "cpu" or self._is_given("overlap"):
            return NOTHING
        others = [value for value in (True, False) if own.overlap != value]
        texts = map(toml_value, others)
        return Dimension((Choice(""), *(Choice(f"overlap={t}", (("overlap", t),), basis=OVERLAPPED) for t in texts)))

    def _compilers(self, own: Experiment) -> Dimension:
        if not self._sets_compiler:
            return NOTHING
        preset = self._compiler(own).preset
        if not isinstance(own.compiler, str):
            first = Choice("its own compiler options", options=tuple(own.compiler.items()))
        else:
            first = Choice("", () if own.compiler == "auto" else (("compiler", own.compiler),), preset=preset)
        presets = (
            Choice(f"compiler={name}", (("compiler", name),), preset=name, basis=OVERLAPPED)
            for name in PRESETS
            if name != preset
        )
        tables = (
            Choice(f"compiler={name}", options=tuple(options.items()), basis=OVERLAPPED)
            for name, options in COMPILERS.items()
        )
        return Dimension((first, *presets, *tables))

    def _option(self, own: Experiment, name: str, value: bool | int, basis: str) -> Dimension:
        """Return one option of XLA's compiler beside the others, if the experiment does not set it."""
        if not self._sets_compiler or (not isinstance(own.compiler, str) and name in own.compiler):
            return NOTHING
        label = f"{name.removeprefix('xla_gpu_')}={toml_value(value)}"
        return Dimension((Choice(""), Choice(label, options=((name, value),), basis=basis)))

    def _compiler(self, experiment: Experiment) -> Compiler:
        """Return an experiment's compiler options, "auto" settled for its mesh."""
        devices = list(self.target.devices)
        return Compiler.of(experiment.compiler).on(Assembly.on_devices(experiment, devices).mesh)

    @property
    def _sets_compiler(self) -> bool:
        """Whether the search may set options of XLA's compiler for GPUs."""
        return self.target.devices[0].platform == "gpu" and not self._is_given("compiler")

    def _scans(self, own: Experiment) -> Dimension:
        config = own.model.config
        if not isinstance(config, GPTConfig | ViTConfig) or self._is_given("model.scan"):
            return NOTHING
        if config.scan and config.layers > MOST_UNROLLED:
            return NOTHING
        text = toml_value(not config.scan)
        return Dimension((Choice(""), Choice(f"scan={text}", (("model.scan", text),))))


NOTHING = Dimension((Choice(""),))
"""Nothing to choose: the experiment's own."""
