"""The public names, their arguments in the promised order, and what importing them costs."""

import ast
import inspect
import operator

import jax
import jax.numpy as jnp
import pytest
from paths import ROOT

import jdp

SIGNATURES = {
    "initialize": "(coordinator=None, num_processes=None, process_id=None, *, timeout_seconds=300)",
    "keep_programs": "(folder=None, *, limit_bytes=1073741824)",
    "make_mesh": "(*, devices=None, **axes)",
    "Plan": "(mesh, strategy='ddp', *, rules=(), min_shard_size=1024, offload=None)",
    "init_state": "(init, tx, plan, *, rng, wrt=None)",
    "abstract_state": "(init, tx, plan, *, rng, wrt=None)",
    "make_train_step": (
        "(loss_fn, plan, *, accumulate=1, precision='fp32', partitioning=None, clip_norm=None, wire=None, "
        "buckets=None, check_loss=True, donate=True, compiler='auto')"
    ),
    "make_eval_step": (
        "(loss_fn, plan, *, accumulate=1, precision='fp32', partitioning=None, check_loss=True, compiler='auto')"
    ),
    "value_and_grad": (
        "(loss_fn, plan, *, argnums=0, has_aux=False, wrt=None, accumulate=1, precision='fp32', partitioning=None, "
        "wire=None, check_loss=True)"
    ),
    "init": "(init, plan, *, rng=None, of=None)",
    "place": "(tree, plan, *, of=None)",
    "verify": "(step, *arguments, target=None, cache=True, **other)",
    "foresee": "(step, *arguments, target=None, cache=True, **other)",
    "with_ema": "(tx, decay, *, debias=False)",
    "ema_params": "(state)",
    "muon": (
        "(learning_rate, *, ns_coeffs='standard', ns_steps=5, beta=0.95, eps=1e-08, weight_decay=0.0, "
        "weight_decay_mask=None, mu_dtype=None, nesterov=True, adaptive=False, preconditioning='frobenius', "
        "adam_b1=0.9, adam_b2=0.999, adam_eps_root=0.0, adam_weight_decay=0.0, adam_learning_rate=None, "
        "muon_weight_dimension_numbers=None, consistent_rms=None)"
    ),
    "scaled_lr": "(base_lr, *, base_batch, batch, rule='linear')",
    "warmup": "(rate, steps, *, start=0.0)",
    "scan_layers": "(block, stacked, x, *, remat=None)",
    "shard_batches": "(loader, plan, *, prefetch=2)",
    "process_rows": "(plan, batch_size)",
    "Checkpoints": "(directory, *, keep=3, keep_every=None, best=None, mode='min', keep_in_memory=0, mirror=None)",
    "save": "(path, state, *, overwrite=False)",
    "restore": "(path, target)",
    "restore_params": "(path, target, *, missing=(), ignore=())",
    "Deadline": "(seconds=300.0, first_seconds=3600.0)",
    "Precision": "(params='fp32', compute='fp32', reduce='fp32')",
    "Step.lower": "(self, state, batch)",
    "Step.compile": "(self, state, batch, **compiler_options)",
    "Step.__call__": "(self, state, batch)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_in_the_promised_order(name):
    parameters = inspect.signature(operator.attrgetter(name)(jdp)).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_a_loss_has_total_weight_and_metrics():
    assert list(inspect.signature(jdp.Loss).parameters) == ["total", "weight", "metrics"]
    loss = jdp.Loss(jnp.ones(()), jnp.ones(()))
    assert loss.metrics == {}
    assert loss.metrics is not jdp.Loss(1, 1).metrics  # not one dictionary for all
    assert len(jax.tree.leaves(jdp.Loss(1.0, 2.0, {"a": 3.0, "b": (4.0, 5.0)}))) == 5  # a pytree


def test_records_have_the_promised_fields():
    fields = lambda kind: list(kind.__dataclass_fields__)  # noqa: E731
    placement = ["path", "shape", "dtype", "rest", "compute", "bytes_per_device", "reason", "trained", "memory"]
    assert fields(jdp.Placement) == placement
    assert {"step", "params", "opt_state", "model_state", "rng"} <= set(fields(jdp.TrainState))


def test_type_checkers_see_the_names_that_there_are():
    tree = ast.parse((ROOT / "jdp" / "__init__.py").read_text(encoding="utf-8"))
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    there = {name: getattr(jdp, name) for name in dir(jdp) if not name.startswith("_")}
    modules = {name: one.__name__ for name, one in there.items() if inspect.ismodule(one)}
    assert seen == {name: f"{one.__module__}.{name}" for name, one in there.items() if name not in modules} | modules


def test_a_missing_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Plans'"):
        jdp.Plans  # noqa: B018
