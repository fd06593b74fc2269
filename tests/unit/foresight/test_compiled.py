"""A step is compiled once by content; what XLA refuses is one clear error; XLA's warnings belong to the program."""

import zlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.base.disk_cache import Cache
from jdp.core.compiling import options
from jdp.foresight.program.compiled import CompileError, compile_step
from jdp.foresight.targets.resolve import target


def lowered(scale: float = 2.0, size: int = 8):
    return jax.jit(lambda x: x @ x * scale).lower(jax.ShapeDtypeStruct((size, size), jnp.float32))


@pytest.mark.aot
def test_jax_keeps_no_described_programs(tmp_path):
    """It could not read again what is compiled for described devices, and warns of that, here an error."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))  # until the end of this file: `kept_programs`
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    reset_cache()
    mesh = Mesh(target("h100:1x2").devices, "data")
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    for _ in range(2):
        assert compile_step(jax.jit(lambda x: x * 2.5).lower(x)).output_bytes == 128
        options._accepted.cache_clear()
        assert options.Compiler.of("overlap").for_mesh(mesh)  # options are tried before they are given
    assert compile_step(lowered()).output_bytes == 256 and not list(tmp_path.iterdir())
    lowered().compile()
    assert list(tmp_path.iterdir())  # JAX keeps other programs as before


@pytest.mark.parametrize(
    ("shape", "given"),
    [({"scale": 3.0}, {}), ({"size": 16}, {}), ({}, {"target": target("cpu:2")}), ({}, {"options": {"a": 1}})],
)
def test_another_content_is_compiled(tmp_path, shape, given):
    cache = Cache(tmp_path)
    compile_step(lowered(), cache=cache)
    assert not compile_step(lowered(**shape), cache=cache, **given).cached


@pytest.mark.parametrize("damage", [b"not zlib", zlib.compress(b'{"text": ""}')])
def test_a_damaged_entry_is_made_again(tmp_path, damage):
    cache, program = Cache(tmp_path), lowered()
    compile_step(program, cache=cache)
    (entry,) = tmp_path.glob("*.json.z")
    entry.write_bytes(damage)
    assert [compile_step(program, cache=cache).cached for _ in range(2)] == [False, True]


@pytest.mark.aot
def test_the_gpu_compilers_refusal_is_one_line():
    """A program that the real GPU compiler cannot compile: a custom call that nobody registered."""
    device = target("h100:1x1").devices[0]
    sharding = NamedSharding(Mesh([device], ("data",)), PartitionSpec())
    call = jax.ffi.ffi_call("jdp_tests_no_such_call", jax.ShapeDtypeStruct((8,), jnp.float32))
    program = jax.jit(lambda x: call(x)).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    with pytest.raises(CompileError, match=r"XLA did not compile this step: .*jdp_tests_no_such_call") as caught:
        compile_step(program)
    assert "\n" not in str(caught.value)


def test_a_compiler_without_memory_names_the_remedy():
    class Large:
        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nmore")

    with pytest.raises(CompileError, match=r"allocating 99 bytes\.\. Reduce the memory of a device: another strategy"):
        compile_step(Large())
