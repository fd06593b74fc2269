"""FLOPs and bytes of single instructions, counted by hand: in programs that XLA's GPU compiler made, and in texts whose
every number is known."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest
from described_gpus import program_of
from paths import EXPERIMENTS

from jdp.foresight.program.module import parse
from jdp.foresight.targets.resolve import target
from jdp.foresight.timing.kernels import CostModel, cost, unknown_work
from jdp.foresight.timing.matmuls import Attention, Product, attention_seconds
from jdp.foresight.timing.timeline import ATTENTION, PRODUCTS, timeline


def entry_costs(program):
    return {step.name: cost(step, program.entry, program) for step in program[program.entry]}


def flops(program):
    return sum(c.flops for c in entry_costs(program).values())


@pytest.mark.aot
def test_a_product_with_an_epilogue_is_one_fusion():
    program = program_of(lambda x, w, b: jnp.tanh(x @ w + b), (1024, 512), (512, 2048), (2048,))
    costs = entry_costs(program)
    assert flops(program) == 2 * 1024 * 512 * 2048
    [fusion] = [c for c in costs.values() if c.products]
    assert [product.dtype for product in fusion.products] == ["bf16"]
    assert fusion.special_functions == 1024 * 2048  # the tanh is inside
    assert fusion.bytes == 2 * (1024 * 512 + 512 * 2048 + 2048 + 1024 * 2048)


@pytest.mark.aot
def test_convolutions_forward_and_backward():
    def convolution(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(x, w):
        return (convolution(x, w).astype(jnp.float32) ** 2).sum()

    program = program_of(jax.grad(loss, (0, 1)), (4, 16, 16, 32), (3, 3, 32, 64))
    one = 2 * (4 * 16 * 16 * 64) * (3 * 3 * 32)
    assert flops(program) == 3 * one  # the output, for the loss' gradient; and the gradients of input and kernel


def text(entry, others="", parameters=()):
    """A module whose entry has `parameters` p0, p1, … of these types, and the lines of `entry`."""
    given = "\n".join(f"  %p{i} = {kind} parameter({i})" for i, kind in enumerate(parameters))
    return f"HloModule m, is_scheduled=true\n{others}\nENTRY %main () -> f32[] {{\n{given}\n  {entry}\n}}\n"


def only(entry, others="", parameters=()):
    """What the entry's one line that is no parameter costs."""
    program = parse(text(entry, others, parameters))
    return cost(program[program.entry][-1], program.entry, program)


def fused(lines, call, parameters):
    """A fusion that holds `lines`."""
    return only(f"ROOT %f = {call}, kind=kLoop, calls=%inside", f"%inside () -> f32[] {{\n{lines}\n}}\n", parameters)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ROOT %c = f32[64,32]{0,1} copy(%p0)", 2 * 4 * 2048),
        ("ROOT %c = bf16[64,32]{1,0} convert(%p0)", (4 + 2) * 2048),
        ("ROOT %c = f32[32,64]{1,0} transpose(%p0), dimensions={1,0}", 2 * 4 * 2048),
        ("ROOT %a = f32[64,32]{1,0} add(%p0, %p0)", 2 * 4 * 2048),  # one operand, read once
        ("ROOT %i = s32[2048]{0} iota(), iota_dimension=0", 4 * 2048),
        ("ROOT %s = f32[4,32]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={4,32}", 2 * 4 * 128 + 4),
        ("ROOT %u = f32[64,32]{1,0} dynamic-update-slice(%p0, %p2, %p1, %p1)", 2 * 4 * 64 + 4),
    ],
)
def test_bytes_of_plain_instructions(line, expected):
    assert only(line, parameters=["f32[64,32]{1,0}", "s32[]", "f32[2,32]{1,0}"]).bytes == expected


SLICED = """  %a = f32[12,100,50]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,100,50]{2,1,0} dynamic-slice(%a, %i, %z, %z), dynamic_slice_sizes={1,100,50}
  %b = f32[100,50]{1,0} bitcast(%s)
  ROOT %c = bf16[100,50]{1,0} convert(%b)"""
UPDATED = """  %a = f32[12,1000]{1,0} parameter(0)
  %u = bf16[1000]{0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %c = f32[1000]{0} convert(%u)
  %b = f32[1,1000]{1,0} bitcast(%c)
  ROOT %d = f32[12,1000]{1,0} dynamic-update-slice(%a, %b, %i, %z)"""


def test_slices_and_updates_count_what_they_move():
    work = fused(SLICED, "bf16[100,50]{1,0} fusion(%p0, %p1)", ["f32[12,100,50]{2,1,0}", "s32[]"])
    assert work.bytes == 4 * 5000 + 4 + 2 * 5000
    given = ["f32[12,1000]{1,0}", "bf16[1000]{0}", "s32[]"]
    assert fused(UPDATED, "f32[12,1000]{1,0} fusion(%p0, %p1, %p2)", given).bytes == 2 * 1000 + 4 + 4 * 1000


A, B, S8 = "[64,16]{1,0}", "[16,32]{1,0}", "s8[4194304]{0}"
LIBRARY = [
    (f"(f32[64,32]{{1,0}}, {S8})", "__cublas$gemm", [f"f32{A}", f"f32{B}"], (1, 64, 32, 16, "f32")),
    ("bf16[5,64,32]{2,1,0}", "__cublas$lt$matmul", ["bf16[5,64,16]{2,1,0}", "bf16[5,16,32]{2,1,0}"],
     (5, 64, 32, 16, "bf16")),
    (f"(bf16[64,32]{{1,0}}, {S8})", "__cublas$lt$matmul$f8", [f"f8e5m2{A}", f"f8e4m3fn{B}"], (1, 64, 32, 16, "f8e5m2")),
]  # fmt: skip


@pytest.mark.parametrize(("result", "called", "operands", "expected"), LIBRARY, ids=[row[1] for row in LIBRARY])
def test_library_products_follow_from_their_shapes(result, called, operands, expected):
    work = only(f'ROOT %c = {result} custom-call(%p0, %p1), custom_call_target="{called}"', parameters=operands)
    assert work.products == (Product(*expected),)
    sizes = [*operands, result.strip("(").split("}")[0] + "}"]
    assert work.bytes == sum(parse(text("", parameters=sizes))["main"][i].result_bytes for i in range(3))


@pytest.mark.parametrize(
    ("dtypes", "attributes", "expected"),
    [
        (("bf16", "bf16"), "", ("bf16", 1)),
        (("bf16", "f32"), "", ("f32", 1)),
        (("f32", "f32"), ", operand_precision={highest,highest}", ("vector", 1)),
        (("f32", "f32"), ", algorithm=dot_f32_f32_f32", ("vector", 1)),
        (("f32", "f32"), ", algorithm=dot_bf16_bf16_f32", ("bf16", 1)),
        (("f32", "f32"), ", algorithm=dot_bf16_bf16_f32_x6", ("bf16", 6)),
        (("f32", "f32"), ", algorithm=dot_tf32_tf32_f32_x3", ("f32", 3)),
        (("f8e5m2", "f8e4m3fn"), ", algorithm=dot_any_f8_any_f8_f32", ("f8e4m3fn", 1)),
    ],
)
def test_the_type_a_product_is_done_in(dtypes, attributes, expected):
    line = "ROOT %d = f32[8,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}" + attributes
    (product,) = only(line, parameters=[f"{dtype}[8,8]{{1,0}}" for dtype in dtypes]).products
    assert (product.dtype, product.passes) == expected


FLASH = (
    'ROOT %c = ({result}, u8[256]{{0}}) custom-call(%p0, %p1, %p2), custom_call_target="__cudnn$fmha{target}", '
    'backend_config={{"cudnn_fmha_backend_config":{{"dropout_rate":0.0,"intermediate_tensor_shape":{{"dimensions":["2",'
    '"3","512","1024"],"element_type":"BF16"}},"mask_type":"{mask}","sliding_window_length":{window}}}}}'
)


@pytest.mark.parametrize(("target", "products"), [("Softmax", 2), ("SoftmaxBackward", 5), ("ScaleBiasSoftmax", 2)])
@pytest.mark.parametrize(
    ("mask", "window", "seen"), [("NO_MASK", 0, 1024), ("CAUSAL", 0, 512), ("CAUSAL", 256, 224), ("PADDING", 0, 1024)]
)
def test_fused_attention_follows_from_its_shapes(target, products, mask, window, seen):
    result, heads = "bf16[2,512,3,64]{3,2,1,0}", ["bf16[2,512,3,64]{3,2,1,0}", *["bf16[2,1024,3,64]{3,2,1,0}"] * 2]
    work = only(FLASH.format(result=result, target=target, mask=mask, window=window), parameters=heads)
    assert work.flops == products * 2 * 2 * 3 * 512 * seen * 64
    assert work.bytes == 2 * (2 * 512 * 3 * 64 * 2 + 2 * 2 * 1024 * 3 * 64)  # queries and result, keys and values
    assert work.launches == (3 if "Backward" in target else 1)
    line = FLASH.format(result=result, target=target, mask=mask, window=window)
    assert only(line.replace('":', '": '), parameters=heads) == work  # as jax writes it, unlike XLA
    assert unknown_work(parse(text(line, parameters=heads))["main"][-1]) is None


# TFLOP/s of cuDNN 9 on an H100, 16k tokens, 2048 elements: figures 5 and 6 of arXiv:2407.08608. (width, causal,
# backward), then lengths of 512, 1k, ... 16k.
CUDNN = {
    (64, False, False): (335, 373, 395, 408, 412, 413),
    (128, False, False): (497, 574, 617, 609, 600, 595),
    (128, True, False): (315, 410, 484, 518, 529, 539),
    (64, False, True): (266, 348, 395, 417, 432, 433),
    (128, False, True): (305, 408, 465, 499, 518, 516),
}


def test_fused_attention_takes_as_long_as_published():
    ratios = []
    for (width, causal, backward), rates in CUDNN.items():
        for i, published in enumerate(rates):
            length = 512 * 2**i
            heads = 16384 // length * 2048 // width
            call = Attention(heads, length, length, width, width, "bf16", causal=causal, backward=backward)
            took = attention_seconds(call, 989.4e12, 16 * 132 * 1.83e9)
            took += call.pass_bytes / (0.9 * 3.35e12)
            ratios.append(call.flops / took / (1e12 * published))
    assert max(ratios) < 1.2
    assert min(ratios) > 1 / 1.2
    assert sorted(abs(ratio - 1) for ratio in ratios)[len(ratios) // 2] < 0.07


@pytest.mark.aot
def test_a_step_takes_as_long_as_measured():
    """GPT-2 124M on an H200: the program that ran, and its kernels.

    In so short a run products reached 0.75 of the peak, `CostModel`'s own rate; the chip's is that of long runs.
    """
    file = EXPERIMENTS / "benchmarks/kernels/gpt2_124m_32.json.gz"
    measured = json.loads(gzip.decompress(file.read_bytes()))
    program, kernels = parse(measured["text"]), measured["kernels"]
    seconds = lambda *names: 1e-6 * sum(row[3] for row in kernels if any(name in row[1] for name in names))  # noqa: E731
    foreseen, short = (timeline(program, target("h200:1x1"), model) for model in (None, CostModel()))
    assert foreseen.compute_seconds == pytest.approx(seconds(""), rel=0.1)
    assert short.parts[ATTENTION] == pytest.approx(seconds("cudnn"), rel=0.1)
    assert short.parts[PRODUCTS] == pytest.approx(seconds("nvjet", "gemm_fusion", "splitK"), rel=0.05)
    assert not any("fmha" in caveat for caveat in short.caveats)
