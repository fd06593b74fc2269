"""Which attention a step gets, by the devices it is traced for, and what of it the backward pass keeps."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from described_gpus import assert_alike, compiled_step
from jax.sharding import PartitionSpec

import jdp
from jdp.core.sharding.mesh import traced_device, tracing_on
from jdp.foresight.targets.relocate import answered_for
from jdp.foresight.targets.resolve import target
from jdp.models import GPTConfig
from jdp.models.attention import attend, cudnn_refuses

CONFIG = GPTConfig(vocab_size=128, context=160, layers=3, width=64, heads=4, kv_heads=2, tied=True)

COLUMNS = ("attention/query", "attention/key", "attention/value", "mlp/up")
TENSOR_PARALLEL = [
    *((f"*/{name}/kernel", PartitionSpec(None, None, "model")) for name in COLUMNS),
    *((f"*/{name}/kernel", PartitionSpec(None, "model")) for name in ("attention/output", "mlp/down")),
    ("embed/tokens", PartitionSpec("model")),
]


@functools.cache
def compiled_for_h100s(strategy, *, partitioning=None, model=1, **changes):
    config = dataclasses.replace(CONFIG, activation="gelu", **changes)
    axes = {"data": 1, "model": model} if model > 1 else {"data": 1}
    mesh = jdp.make_mesh(devices=jax.devices()[:model], **axes)
    plan = jdp.Plan(mesh, strategy, rules=TENSOR_PARALLEL if model > 1 else ())
    return compiled_step("h100:1x8", config, plan, partitioning=partitioning)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        ("zero3", {"remat": "dots"}, 3),  # once in each of three layers: its output and statistics are kept
        (
            "ddp",
            {"layers": 2, "remat": "full", "attention": "cudnn", "partitioning": "auto", "window": 64, "qk_norm": True},
            4,
        ),
        ("zero1", {"layers": 2, "remat": "dots", "attention": "xla"}, 0),
    ],
    ids=["zero3", "auto partitioning", "xla"],
)
@pytest.mark.default_ids("zero3")
def test_compiled_for_h100s_auto_is_cudnn(strategy, changes, expected):
    compiled, verdict = compiled_for_h100s(strategy, **changes)
    text = compiled.text
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == expected
    assert ('custom_call_target="__cudnn$fmhaSoftmaxBackward"' in text) == bool(expected)
    assert verdict.kept or "partitioning" in changes, verdict.breaches
    assert ('"sliding_window_length":64' in text.replace(" ", "")) == ("window" in changes)
    assert "[16,160,4,16]" not in text  # of a device, not gathered
    if expected:
        assert "160,160]" not in text
    assert not re.search(r"\[[23],2,4,160,160\]", text)  # no weights of attention are kept for the backward pass


@pytest.mark.rest
@pytest.mark.aot
def test_sharded_heads_and_vocabulary_stay_put():
    compiled, verdict = compiled_for_h100s("zero1", model=2, layers=2, remat="full")
    assert 'custom_call_target="__cudnn$fmhaSoftmaxBackward"' in compiled.text
    assert verdict.kept, verdict.breaches
    assert {each.collective.kind for each in verdict.collectives if not each.over_batch} == {"all-reduce"}


@pytest.mark.aot
def test_tracing_for_described_gpus_changes_nothing_here():
    devices = target("a100:1x1").devices
    with tracing_on(jdp.make_mesh(devices=devices)), answered_for(devices[0]):
        assert traced_device() is devices[0]
        assert "fwd_wrapper" in str(jax.make_jaxpr(functools.partial(attend, causal=True))(*[QUERY] * 3))
    assert traced_device().platform == "cpu"
    with pytest.raises(ValueError, match=r'runs on NVIDIA GPUs; given cpu\. Set attention = "auto" or "xla"'):
        attend(QUERY, QUERY, QUERY, causal=True, by="cudnn")


QUERY = jnp.zeros((2, 8, 4, 16), jnp.bfloat16)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("kind", "query", "packed", "words"),
    [
        ("h100", QUERY, False, None),
        ("a100", QUERY, False, None),
        ("h100", jnp.zeros((1, 4, 2, 256), jnp.float16), False, None),
        ("a100", jnp.zeros((1, 4, 2, 256), jnp.float16), False, "at most 128 elements, a multiple of 8"),
        ("h100", QUERY[..., :12], False, "a multiple of 8"),
        ("h100", QUERY.astype(jnp.float32), False, "16-bit floats"),
        ("h100", QUERY, True, "no segments"),
        ("cpu", QUERY, False, "runs on NVIDIA GPUs"),
    ],
)
def test_what_cudnn_refuses(kind, query, packed, words):
    devices = jax.devices() if kind == "cpu" else target(f"{kind}:1x1").devices
    with answered_for(devices[0]):
        refused = cudnn_refuses(query, query, packed=packed, device=devices[0])
    assert (refused is None) if words is None else (words in refused[0])


@pytest.mark.parametrize(
    ("dtype", "bound", "window"), [(jnp.float32, 1e-5, None), (jnp.bfloat16, 3e-2, None), (jnp.float32, 1e-5, 40)]
)
def test_on_cpus_query_blocks_equal_the_whole(dtype, bound, window):
    forms = [functools.partial(attend, causal=True, window=window, by=by) for by in ("auto", "xla")]
    operands = assert_alike(forms, 128, dtype, bound)
    for length, products in ((128, 4), (126, 2)):  # two blocks, and one
        text = str(jax.make_jaxpr(functools.partial(attend, causal=True))(*(x[:, :length] for x in operands)))
        assert text.count("dot_general") == products
