"""The HLO reader against texts: lines that compilers print (jax 0.10 and 0.12, harvested), and texts it must refuse."""

import pytest

from jdp.foresight.program.collectives import collectives


def module(*entry: str, before: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in entry)
    head = "HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[])->f32[]}, num_partitions=8\n"
    return f"{head}\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{lines}\n}}\n"


EVERYONE = "replica_groups={{0,1,2,3,4,5,6,7}}"
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'
ASYNC = 'backend_config={"collective_backend_config":{"is_sync":false}}'


V, W, X = "f32[100]{0}", "f32[35]{0}", "f32[8,16]{1,0"
FORMS = [  # kind, type, groups and the rest, payload, whether it is asynchronous
    # jax 0.10: the start has the type of its result, combined a flat tuple, and may be synchronous all the same
    ("all-reduce-start", "f32[135]{0}", f"channel_id=1, {EVERYONE}, to_apply=%add, {ASYNC}", 540, True),
    ("all-reduce-start", f"({V}, {W})", f"{EVERYONE}, to_apply=%add, {ASYNC}", 540, True),
    ("all-reduce-start", "f32[135]{0}", f"{EVERYONE}, to_apply=%add, {SYNC}", 540, False),
    # jax 0.12: ((operands), results)
    ("all-reduce-start", "((bf16[8,128]{1,0}), bf16[8,128]{1,0})", f"replica_groups=mesh['d'=8] {{'d'}}, {ASYNC}", 2048,
     True),
    ("all-reduce-start", f"(({V}, {W}), ({V}, {W}))", EVERYONE, 540, True),
    ("all-gather-start", "(f32[8,16]{1,0}, f32[64,16]{1,0})", EVERYONE, 4096, True),
    ("all-gather-start", "((f32[8,16]{1,0}, bf16[1,4]{1,0}), (f32[64,16]{1,0}, bf16[8,4]{1,0}))", EVERYONE, 4160, True),
    ("reduce-scatter-start", "((f32[64,128]{1,0}), f32[8,128]{1,0})", f"{EVERYONE}, to_apply=%add", 32768, True),
    # an older permute carries two context words behind the result
    ("collective-permute-start", "(f32[8]{0}, f32[8]{0}, u32[], u32[])", "source_target_pairs={{0,1},{1,0}}", 32, True),
    # index comments, memory spaces, packed elements, bounded sizes, scalars
    ("all-to-all", f"({X}:S(1)}}{f', {X}}}' * 4}, /*index=5*/{X}}}{f', {X}}}' * 2})", EVERYONE, 4096, False),
    ("all-gather", "s4[64,128]{1,0:E(4)}", EVERYONE, 4096, False),
    ("all-gather", "f32[<=64,128]{1,0}", EVERYONE, 32768, False),
    ("all-reduce", "f32[]", f"{EVERYONE}, to_apply=%add", 4, False),
]  # fmt: skip


@pytest.mark.parametrize("named", ["%s", "ROOT a"])
@pytest.mark.parametrize(("opcode", "type_text", "rest", "payload", "is_async"), FORMS)
def test_printed_forms(opcode, type_text, rest, payload, is_async, named):
    name, kind = named.split()[-1].lstrip("%"), opcode.removesuffix("-start")
    done = f"%d = f32[] {kind}-done(%{name}), {SYNC}"
    [found] = collectives(module(f"{named} = {type_text} {opcode}(%x, %y), {rest}", done))
    assert (found.kind, found.payload_bytes, found.is_async, found.name) == (kind, payload, is_async, name)


WRAPPED = f"""\
%wrapped (p: f32[64,128]) -> f32[8,128] {{
  %p = f32[64,128]{{1,0}} parameter(0)
  ROOT %inner = f32[8,128]{{1,0}} reduce-scatter(%p), {EVERYONE}, to_apply=%add, metadata={{op_name="g"}}
}}, execution_thread="parallel"
"""


@pytest.mark.parametrize(
    ("start", "is_async"),
    [
        ("%s = ((f32[64,128]), f32[8,128], u32[]) async-start(%x), calls=%wrapped", True),
        (f"%s = ((f32[64,128]), f32[8,128], u32[]) async-start(%x), calls=%wrapped, {SYNC}", False),
        ("%s = ((f32[64,128]), f32[8,128]) fusion-start(%x), kind=kCustom, calls=%wrapped", True),  # jax 0.12
        ("%s = ((f32[64,128]), f32[8,128]) call-start(%x), to_apply=%wrapped", True),
    ],
)
def test_an_asynchronous_wrapper_counts_once(start, is_async):
    opcode = start.split("(%x)")[0].split()[-1].removesuffix("-start")
    update = f"%u = ((f32[64,128]), f32[8,128]) {opcode}-update(%s), calls=%wrapped"
    done = f"%d = f32[8,128] {opcode}-done(%u), calls=%wrapped"
    [found] = collectives(module(start, update, done, before=WRAPPED))
    assert (found.kind, found.payload_bytes, found.name) == ("reduce-scatter", 32768, "s")
    assert (found.is_async, found.op_name) == (is_async, "g")


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['replica'=2,'data'=4] {'replica','data'}", (tuple(range(8)),)),
        ("mesh['replica'=2,'data'=4] {'replica'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh[x=2,y=4] {y}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        ("mesh['x'=2,'y'=2] {}", ((0,), (1,), (2,), (3,))),
        ("{}", (tuple(range(8)),)),
    ],
)
def test_notations_of_device_groups(notation, groups):
    line = f"%g = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={notation}, use_global_device_ids=true"
    [found] = collectives(module(line))
    assert found.groups == groups


def test_strings_do_not_look_like_attributes():
    tricky = r'metadata={op_name="f(x) \"all-reduce(\" replica_groups={{9}} calls=%nowhere {"}'
    first = f"%s = f32[8]{{0}} all-reduce(%x), {tricky}, {EVERYONE}, to_apply=%add"
    last = f"%t = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%quiet, {tricky}"
    quiet = f"%quiet (p: f32[8]) -> f32[8] {{\n  ROOT %p = f32[8] add(%p, %p), {tricky}\n}}\n"
    [found] = collectives(module(first, last, before=quiet))
    assert found.group_size == 8
    assert found.op_name == r"f(x) \"all-reduce(\" replica_groups={{9}} calls=%nowhere {"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "module @jit_step attributes {mhlo.num_partitions = 1 : i32} {\n}",
            r"begins 'module @jit.*compile\(\)\.as_text\(\)",
        ),
        (module("%g = f32[8]{0} all-reduce(%x), replica_groups=<new>"), "no device groups in a known notation"),
        (module(f"%g = q7[8]{{0}} all-reduce(%x), {EVERYONE}, to_apply=%add"), "element type 'q7'"),
    ],
    ids=["not compiled", "groups", "type"],
)
def test_unknown_texts_are_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        collectives(text)
