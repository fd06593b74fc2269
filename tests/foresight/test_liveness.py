"""Buffers of programs small enough to count by hand, written as XLA prints them. A float32 row has 1 KiB."""

import pytest

from jdp.foresight.memory.liveness import Liveness
from jdp.foresight.memory.roles import gradients, working_copies
from jdp.foresight.program.module import parse

KIB = 1024


def live(body, *, before="", header=""):
    """The liveness of an entry computation with these lines, after other computations."""
    return Liveness(parse(f"HloModule m, is_scheduled=true{header}\n{before}\nENTRY %main {{\n{body}\n}}\n"))


def peak(body, **settings):
    return sum(buffer.bytes for buffer in live(body, **settings).peak[1])


def named(found, roles):
    """The names of the instructions that write buffers of a role."""
    return {write.step.name for buffer in roles(found) for write in buffer.writes}


def test_a_buffer_is_held_from_its_write_to_its_last_read():
    body = """
  %p = f32[256]{0} parameter(0)
  %a = f32[256]{0} reverse(%p), dimensions={0}
  %b = f32[512]{0} pad(%a, %a), padding=0_256
  %c = f32[256]{0} slice(%b), slice={[0:256]}
  ROOT %d = f32[256]{0} reverse(%c), dimensions={0}"""
    # a and b, then b and c. Arguments and results are no temporaries.
    assert peak(body) == 3 * KIB
    found = live(body)
    assert [b.home for b in found.buffers] == ["argument", *["temporary"] * 3, "output"]
    assert found.held(("main", "b", ())).spans == [(2, 3)]


@pytest.mark.parametrize(("opcode", "held"), [("exponential(%a)", 1), ("reverse(%a), dimensions={0}", 2)])
def test_an_elementwise_result_takes_the_place_of_an_operand_that_dies(opcode, held):
    body = f"""
  %p = f32[256]{{0}} parameter(0)
  %a = f32[256]{{0}} reverse(%p), dimensions={{0}}
  %b = f32[256]{{0}} {opcode}
  ROOT %c = f32[128]{{0}} slice(%b), slice={{[0:128]}}"""
    assert peak(body) == held * KIB


def test_views_share_memory_and_a_start_holds_its_operands_until_it_is_done():
    body = """
  %p = f32[256]{0} parameter(0)
  %a = f32[256]{0} reverse(%p), dimensions={0}
  %view = f32[16,16]{1,0} bitcast(%a)
  %s = (f32[16,16]{1,0}, f32[128,16]{1,0}) all-gather-start(%view), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %x = f32[512]{0} iota(), iota_dimension=0
  %g = f32[128,16]{1,0} all-gather-done(%s)
  %t = (f32[128,16]{1,0}, f32[512]{0}) tuple(%g, %x)
  %e = f32[512]{0} get-tuple-element(%t), index=1
  ROOT %d = f32[8]{0} fusion(%e, %g), kind=kInput, calls=%f"""
    found = live(body, before="%f {\n  ROOT %r = f32[8]{0} parameter(0)\n}")
    assert sum(b.bytes for b in found.peak[1]) == (1 + 8 + 2) * KIB
    assert found.held(("main", "view", ())) is found.held(("main", "s", (0,)))
    assert found.held(("main", "g", ())) is found.held(("main", "s", (1,)))
    assert found.held(("main", "e", ())) is found.held(("main", "x", ()))


@pytest.mark.parametrize(
    "start",
    ["f32[256]{0} all-reduce-start(%a)", "((f32[256]{0}), f32[256]{0}) all-reduce-start(%a)"],
    ids=["jax 0.10", "later"],
)
def test_both_forms_of_an_all_reduce_start(start):
    body = f"""
  %p = f32[256]{{0}} parameter(0)
  %a = f32[256]{{0}} reverse(%p), dimensions={{0}}
  %s = {start}, replica_groups={{{{0,1}}}}, to_apply=%add
  %d = f32[256]{{0}} all-reduce-done(%s)
  ROOT %e = f32[128]{{0}} slice(%d), slice={{[0:128]}}"""
    assert peak(body) == 2 * KIB


LOOP = """
%f {
  %x = f32[4,256]{1,0} parameter(0)
  %u = f32[1,256]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %r = f32[4,256]{1,0} dynamic-update-slice(%x, %u, %j, %z)
}
%cond {
  %q = (s32[], f32[4,256]{1,0}, f32[256]{0}) parameter(0)
  %k = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(4)
  ROOT %l = pred[] compare(%k, %n), direction=LT
}
%body {
  %c = (s32[], f32[4,256]{1,0}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %stack = f32[4,256]{1,0} get-tuple-element(%c), index=1
  %w = f32[256]{0} get-tuple-element(%c), index=2
  %row = f32[1,256]{1,0} reshape(%w)
  %new = f32[4,256]{1,0} fusion(%stack, %row, %i), kind=kLoop, calls=%f
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[4,256]{1,0}, f32[256]{0}) tuple(%next, %new, %w)
}"""


def test_a_loop_updates_its_carry_where_it_stands():
    """Held are the counter, the stack once, what is passed through, and the row at hand."""
    body = """
  %p = f32[256]{0} parameter(0)
  %i0 = s32[] constant(0)
  %k0 = s32[] copy(%i0)
  %s0 = f32[4,256]{1,0} broadcast(%i0), dimensions={}
  %v0 = f32[256]{0} reverse(%p), dimensions={0}
  %t0 = (s32[], f32[4,256]{1,0}, f32[256]{0}) tuple(%k0, %s0, %v0)
  %loop = (s32[], f32[4,256]{1,0}, f32[256]{0}) while(%t0), condition=%cond, body=%body
  %done = f32[4,256]{1,0} get-tuple-element(%loop), index=1
  ROOT %e = f32[2,256]{1,0} slice(%done), slice={[0:2], [0:256]}"""
    found = live(body, before=LOOP)
    assert sum(b.bytes for b in found.peak[1]) == (4 + 1 + 1) * KIB + 4
    assert found.held(("main", "s0", ())) is found.held(("body", "new", ())) is found.held(("main", "done", ()))
    assert found.held(("main", "k0", ())) is found.held(("body", "next", ())) is found.held(("cond", "k", ()))
    assert [step.name for _, step in found.schedule][-3:] == ["loop", "done", "e"]


def test_a_carry_is_held_from_its_write_to_the_end_of_the_body():
    """The next round's value stands beside what the rest of the body needs."""
    before = """
%cond {
  %q = (f32[256]{0}, f32[256]{0}) parameter(0)
  ROOT %l = pred[] constant(true)
}
%body {
  %c = (f32[256]{0}, f32[256]{0}) parameter(0)
  %x = f32[256]{0} get-tuple-element(%c), index=0
  %w = f32[256]{0} get-tuple-element(%c), index=1
  %new = f32[256]{0} reverse(%w), dimensions={0}
  %much = f32[1024]{0} pad(%w, %w), padding=0_768
  %less = f32[4]{0} slice(%much), slice={[0:4]}
  ROOT %out = (f32[256]{0}, f32[256]{0}) tuple(%new, %w)
}"""
    body = """
  %p = f32[256]{0} parameter(0)
  %a = f32[256]{0} reverse(%p), dimensions={0}
  %b = f32[256]{0} negate(%p)
  %t = (f32[256]{0}, f32[256]{0}) tuple(%a, %b)
  %loop = (f32[256]{0}, f32[256]{0}) while(%t), condition=%cond, body=%body
  %e = f32[256]{0} get-tuple-element(%loop), index=0
  ROOT %r = f32[4]{0} slice(%e), slice={[0:4]}"""
    assert peak(body, before=before) == (1 + 1 + 4) * KIB + 16
    found = live(body, before=before)
    time = {step.name: time for time, (_, step) in enumerate(found.schedule)}
    # Its first value is never read: of that memory others may have use until the body writes the next one.
    spans = [(time["a"], time["a"]), (time["new"], time["r"])]
    assert found.held(("body", "new", ())).spans == found.held(("main", "a", ())).spans == spans


def test_a_fusion_that_ends_in_an_update_is_in_place():
    before = LOOP[: LOOP.index("%cond")]
    body = """
  %p = f32[1,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[4,256]{1,0} pad(%p, %i), padding=0_3x0_0
  %new = f32[4,256]{1,0} fusion(%s, %p, %i), kind=kLoop, calls=%f
  ROOT %e = f32[2,256]{1,0} slice(%new), slice={[0:2], [0:256]}"""
    assert peak(body, before=before) == 4 * KIB


def test_donated_arguments_take_the_results():
    body = """
  %p = f32[256]{0} parameter(0), metadata={op_name="state.params['w']"}
  %q = f32[256]{0} parameter(1), metadata={op_name="batch['x']"}
  %a = f32[256]{0} add(%p, %q)
  %b = f32[256]{0} subtract(%p, %q)
  ROOT %t = (f32[256]{0}, f32[256]{0}) tuple(%a, %b)"""
    found = live(body, header=", input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={}")
    assert found.held(("main", "a", ())) is found.held(("main", "p", ()))
    assert found.held(("main", "a", ())).argument == "state.params['w']"
    assert found.held(("main", "b", ())).home == "output"
    assert found.peak[1] == []


def test_branches_do_not_hold_memory_at_the_same_time():
    before = """
%big {
  %x = f32[256]{0} parameter(0)
  %y = f32[1024]{0} pad(%x, %x), padding=0_768
  ROOT %z = f32[256]{0} slice(%y), slice={[0:256]}
}
%small {
  %x = f32[256]{0} parameter(0)
  %y = f32[512]{0} pad(%x, %x), padding=0_256
  ROOT %z = f32[256]{0} slice(%y), slice={[0:256]}
}"""
    body = """
  %p = pred[] parameter(0)
  %q = f32[256]{0} parameter(1)
  %a = f32[256]{0} reverse(%q), dimensions={0}
  %c = f32[256]{0} conditional(%p, %a, %a), true_computation=%big, false_computation=%small
  ROOT %e = f32[128]{0} slice(%c), slice={[0:128]}"""
    assert peak(body, before=before) == (1 + 4 + 1) * KIB  # the operand, the padded, the result
    found = live(body, before=before)
    assert found.held(("big", "z", ())) is found.held(("small", "z", ())) is found.held(("main", "c", ()))
    assert found.held(("big", "x", ())) is found.held(("small", "x", ())) is found.held(("main", "a", ()))


def test_working_copies_and_gradients_are_told_by_where_they_come_from_and_lead_to():
    before = """
%cast {
  %x = f32[32,8]{1,0} parameter(0)
  ROOT %y = bf16[32,8]{1,0} convert(%x)
}
%update {
  %w = f32[32,8]{1,0} parameter(0)
  %g = f32[32,8]{1,0} parameter(1)
  ROOT %n = f32[32,8]{1,0} subtract(%w, %g)
}"""
    body = """
  %w = f32[32,8]{1,0} parameter(0), metadata={op_name="state.params['w']"}
  %x = bf16[64,256]{1,0} parameter(1), metadata={op_name="batch['x']"}
  %shard = bf16[32,8]{1,0} fusion(%w), kind=kLoop, calls=%cast
  %whole = bf16[256,8]{1,0} all-gather(%shard), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %y = bf16[64,8]{1,0} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %mixed = bf16[320,8]{1,0} concatenate(%whole, %y), dimensions={0}
  %dy = bf16[64,8]{1,0} exponential(%y)
  %dw = bf16[256,8]{1,0} dot(%x, %dy), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %wide = f32[256,8]{1,0} convert(%dw)
  %sum = f32[32,8]{1,0} reduce-scatter(%wide), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
  ROOT %new = f32[32,8]{1,0} fusion(%w, %sum), kind=kLoop, calls=%update"""
    found = live(body, before=before, header=", input_output_alias={ {}: (0, {}) }, entry_computation_layout={}")
    assert named(found, working_copies) == {"shard", "whole"}
    assert named(found, gradients) == {"dw", "wide", "sum"}
