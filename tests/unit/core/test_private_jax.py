"""What jdp takes from `jax._src`, with a test of each name: where a release of JAX changes one, that test fails.

JAX promises none of it. A test has what jdp needs of the name; what jdp does with it is tested where it is used.
"""

import ast
import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax._src import cloud_tpu_init, xla_bridge
from jax._src.clusters import OmpiCluster, SlurmCluster
from jax._src.core import trace_ctx, trace_state_clean
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.distributed import global_state
from jax._src.interpreters.ad import JVPTrace
from jax._src.interpreters.batching import BatchTrace
from jax._src.interpreters.partial_eval import custom_staging_rules
from jax.extend.core.primitives import jit_p

import jdp

PACKAGE = Path(jdp.__file__).parent
TAKEN = {
    "jax._src.cloud_tpu_init": "core/cluster/schedulers.py",
    "jax._src.clusters.OmpiCluster": "core/cluster/schedulers.py",
    "jax._src.clusters.SlurmCluster": "core/cluster/schedulers.py",
    "jax._src.core.trace_ctx": "core/layers.py",
    "jax._src.core.trace_state_clean": "core/step.py",
    "jax._src.cudnn.fused_attention_stablehlo": "foresight/targets/relocate.py models/attention.py",
    "jax._src.distributed.global_state": "core/cluster/barrier.py",
    "jax._src.interpreters.ad.JVPTrace": "core/layers.py",
    "jax._src.interpreters.batching.BatchTrace": "core/layers.py",
    "jax._src.interpreters.partial_eval.custom_staging_rules": "foresight/any_step/traced.py",
    "jax._src.xla_bridge": "base/machine.py",
}
"""Each name, and the files that take it."""


def taken(tree):
    """Yield the names that a file imports from `jax._src`, and modules of it that it looks up by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("jax._src"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("jax._src."):
            yield node.value


def test_the_list_is_complete_and_tested():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in taken(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: " ".join(files) for name, files in found.items()} == TAKEN
    tests = " ".join(name for name in globals() if name.startswith("test_"))
    assert [name for name in TAKEN if f"test_{name.rpartition('.')[2].strip('_').lower()}" not in tests] == []


def test_custom_staging_rules_have_one_for_jit(monkeypatch):
    rule, seen = custom_staging_rules[jit_p], []

    def noted(trace, source, *args, **params):
        seen.append(params["compiler_options_kvs"])
        return rule(trace, source, *args, **params)

    monkeypatch.setitem(custom_staging_rules, jit_p, noted)
    inner = jax.jit(lambda x: x + 1)
    jax.make_jaxpr(lambda x: inner(x))(1.0)
    assert {*seen} == {()}


def traces_of(transformed):
    """Return the traces that are under way in a jitted function which `transformed` transforms."""
    seen = []
    transformed(jax.jit(lambda x: seen.append(trace_ctx.trace) or x))
    while (above := getattr(seen[-1], "parent_trace", None)) is not None:
        seen.append(above)
    return seen


def test_jvptrace_is_one_under_jvp():
    assert any(isinstance(trace, JVPTrace) for trace in traces_of(lambda f: jax.jvp(f, (1.0,), (1.0,))))


def test_trace_ctx_tells_linearize_from_grad():
    assert [trace.is_vjp for trace in traces_of(lambda f: jax.linearize(f, 1.0)) if hasattr(trace, "is_vjp")] == [False]
    assert [trace.is_vjp for trace in traces_of(lambda f: jax.grad(f)(1.0)) if hasattr(trace, "is_vjp")] == [True]


def test_batchtrace_is_one_under_vmap():
    assert any(isinstance(trace, BatchTrace) for trace in traces_of(lambda f: jax.vmap(f)(jnp.zeros(3))))


def test_cloud_tpu_init_detects_tpu_vms():
    assert cloud_tpu_init.running_in_cloud_tpu_vm is False


def test_ompicluster_reads_the_address_of_mpiruns_host(monkeypatch):
    assert not OmpiCluster.is_env_present()
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "2017198080.0;tcp://192.0.2.2,10.0.0.2:39659")
    assert OmpiCluster.is_env_present() and OmpiCluster.get_coordinator_address(None, "9") == "192.0.2.2:9"


def test_slurmcluster_takes_first_node_and_job_port(monkeypatch):
    for name, value in {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "gpu[007-008]"}.items():
        monkeypatch.setenv(name, value)
    assert SlurmCluster.get_coordinator_address(None, None) == "gpu007:61441"
    assert SlurmCluster.get_coordinator_address(None, "9") == "gpu007:9"


def test_trace_state_clean_detects_tracing():
    seen = []
    jax.jit(lambda x: seen.append(trace_state_clean()) or x)(0)
    assert [trace_state_clean(), *seen] == [True, False]


def test_fused_attention_stablehlo_asks_the_gpu():
    """`answered_for` puts others in the place of these, those that there are; the version is always asked."""
    assert not inspect.signature(fused_attention_stablehlo.check_cudnn_version).parameters
    source = inspect.getsource(fused_attention_stablehlo)
    assert "check_cudnn_version()" in source and "check_compute_capability(" in source


def test_global_state_knows_this_process_without_a_backend():
    assert not jax.distributed.is_initialized()
    assert (global_state.process_id, global_state.client) == (0, None)
    assert global_state.num_processes in (None, 1)


def test_xla_bridge_says_whether_a_backend_is_started():
    assert sys.modules["jax._src.xla_bridge"] is xla_bridge
    assert jax.devices() and xla_bridge.backends_are_initialized()
