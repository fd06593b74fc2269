"""Any jitted function as a program: its jaxpr, its arguments with their paths, and their one mesh.

`trace` calls the function on abstract values inside `jax.make_jaxpr`. Any wrapper (`jax.jit`, `nnx.jit`,
`eqx.filter_jit`) leaves one `jit` equation, with the jaxpr, shardings, donations and compiler options for XLA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax._src.interpreters.partial_eval import custom_staging_rules  # nothing public traces a jit with its options
from jax.extend import core
from jax.extend.core.primitives import jit_p
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jdp.base.errors import UserError
from jdp.base.tree_paths import path_of
from jdp.core import flax_nnx
from jdp.core.gradients.loss_call import traced_dtype
from jdp.core.sharding.axes import factors


@dataclass(frozen=True)
class Argument:
    """An array that a jitted function takes."""

    path: str  # in the call: "state/params/kernel"; "(a number)" if jax made the array from a number
    shape: tuple[int, ...]  # global
    dtype: Any
    sharding: NamedSharding | None  # None if the call leaves it to the compiler, as for NumPy arrays
    number: int = -1  # number of its positional argument, or -1
    slot: int = -1  # number among the call's arrays, or -1
    weak_type: bool = False  # weakly typed, like Python's numbers
    donated: bool = False  # the step may write results into its memory

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec() if self.sharding is None else self.sharding.spec

    def abstract(self, *, located: bool = True) -> jax.ShapeDtypeStruct:
        sharding = self.sharding if located else None
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding, weak_type=self.weak_type)


@dataclass(frozen=True)
class Arguments:
    arrays: tuple[Argument, ...]
    # builds the positional arguments from as many other arrays
    rebuild: Callable[[Sequence[Any]], tuple[Any, ...]] = field(repr=False)

    @classmethod
    def of(cls, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Arguments:
        """List the arrays among positional arguments: anything with a shape and a dtype."""
        opened, back = flax_nnx.plain(inputs)
        leaves, treedef = jax.tree.flatten_with_path(opened)
        names = _parameter_names(function, len(inputs))
        slots = [i for i, (_, leaf) in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

        def argument(path: Any, leaf: Any) -> Argument:
            number = path[0].idx
            named = "/".join(filter(None, (names[number], path_of(path[1:]).removesuffix("/value"))))
            weak = bool(getattr(leaf, "weak_type", False))
            return Argument(named, tuple(leaf.shape), traced_dtype(leaf), _sharding(leaf, named), number, weak)

        def rebuild(arrays: Sequence[Any]) -> tuple[Any, ...]:
            filled = [leaf for _, leaf in leaves]
            for slot, array in zip(slots, arrays, strict=True):
                filled[slot] = array
            return back(jax.tree.unflatten(treedef, filled))

        return cls(tuple(argument(*leaves[slot]) for slot in slots), rebuild)


def _parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters if each.kind in positional][:count]
    return names + [str(number) for number in range(len(names), count)]


def _sharding(leaf: Any, path: str) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    if isinstance(sharding, SingleDeviceSharding) and not getattr(leaf, "committed", False):
        return None
    raise UserError(
        f"A step's arguments are placed on a mesh with named axes; given {path} as {sharding}. Place it with "
        "jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)), on the mesh of the other arguments."
    )


@dataclass(frozen=True)
class Traced:
    name: str  # the function's
    closed: core.ClosedJaxpr = field(repr=False)
    arguments: tuple[Argument, ...]  # one for each of the jaxpr's inputs
    out_shardings: tuple[NamedSharding | None, ...]  # of its results; None: not given to the jit
    options: Mapping[str, Any]  # the function's compiler options

    def lower(self) -> jax.stages.Lowered:
        function: Any = core.jaxpr_as_fun(self.closed)
        donated = tuple(number for number, each in enumerate(self.arguments) if each.donated)
        jitted = jax.jit(
            function,
            out_shardings=[*self.out_shardings] if any(self.out_shardings) else None,
            donate_argnums=donated,
            keep_unused=True,
            compiler_options=dict(self.options) or None,
        )
        return jitted.lower(*(each.abstract() for each in self.arguments))


def trace(function: Callable[..., Any], arguments: Arguments) -> Traced:
    def arrays_of(*arrays: Any) -> list[Any]:  # jax.make_jaxpr takes only arrays as results
        return [leaf for leaf in jax.tree.leaves(function(*arguments.rebuild(arrays))) if isinstance(leaf, jax.Array)]

    outer = jax.make_jaxpr(arrays_of)
    located = [each.sharding for each in arguments.arrays if each.sharding is not None]
    explicit = any(AxisType.Explicit in sharding.mesh.axis_types for sharding in located)
    with _options_taken() as options:
        closed = outer(*(each.abstract(located=explicit) for each in arguments.arrays))
    equations = closed.jaxpr.eqns
    if len(equations) != 1 or equations[0].primitive.name not in ("jit", "pjit"):
        name = getattr(function, "__name__", None) or type(function).__name__
        several = f"{name}, which runs {len(equations)} operations one by one"
        raise UserError(f"A step is one jitted function; given {several}. Wrap it: jax.jit(step), or nnx.jit(step).")
    parameters = equations[0].params
    place = {variable: number for number, variable in enumerate(closed.jaxpr.invars)}

    def argument(variable: Any, sharding: Any, donated: bool) -> Argument:
        named = sharding if isinstance(sharding, NamedSharding) else None
        if isinstance(variable, core.Var) and variable in place:
            own = arguments.arrays[place[variable]]
            return replace(own, slot=place[variable], sharding=named or own.sharding, donated=donated)
        aval: Any = variable.aval
        return Argument("(a number)", aval.shape, aval.dtype, named, weak_type=getattr(aval, "weak_type", False))

    inputs = map(argument, equations[0].invars, parameters["in_shardings"], parameters["donated_invars"])
    out_shardings = (s if isinstance(s, NamedSharding) else None for s in parameters["out_shardings"])
    return Traced(parameters["name"], parameters["jaxpr"], tuple(inputs), tuple(out_shardings), dict(options))


@contextmanager
def _options_taken() -> Generator[list[tuple[str, Any]]]:
    """Collect the compiler options of traced jits, which jax refuses inside another trace."""
    rule, options = custom_staging_rules[jit_p], list[tuple[str, Any]]()

    def without_options(trace: Any, source_info: Any, *arguments: Any, **parameters: Any) -> Any:
        options.extend(parameters["compiler_options_kvs"])
        return rule(trace, source_info, *arguments, **{**parameters, "compiler_options_kvs": ()})

    custom_staging_rules[jit_p] = without_options
    try:
        yield options
    finally:
        custom_staging_rules[jit_p] = rule


def mesh_in(arguments: Iterable[Argument], out_shardings: Iterable[NamedSharding | None] = ()) -> Mesh | AbstractMesh:
    named = [(each.sharding, each.path) for each in arguments] + [(each, "a result") for each in out_shardings]
    meshes = [(sharding.mesh, path) for sharding, path in named if sharding is not None]
    if not meshes:
        raise UserError(
            "A step's arguments, real or abstract, must be on a mesh; none of these is. Place them with "
            "jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)), or pass "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
        )
    mesh, path = next((pair for pair in meshes if isinstance(pair[0], Mesh)), meshes[0])
    for other, there in meshes:
        concrete = [each.devices.tolist() for each in (other, mesh) if isinstance(each, Mesh)]
        if other.shape != mesh.shape or (len(concrete) == 2 and concrete[0] != concrete[1]):
            raise UserError(
                f"All arguments of a step are placed on one mesh; given {path} on {_axes(mesh)} and {there} on "
                f"{_axes(other)}. Place them on one mesh, replicated arrays with spec PartitionSpec()."
            )
    return mesh


def _axes(mesh: Mesh | AbstractMesh) -> str:
    sizes = factors(mesh.shape)
    return f"{sizes} ({mesh.devices.flat[0]}, …)" if isinstance(mesh, Mesh) else f"{sizes} of {mesh.size} devices"
