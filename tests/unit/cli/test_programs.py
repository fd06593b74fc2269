"""`jdp verify` and `jdp plan` of a user's function: what is printed, saved, compared and refused."""

import functools
import json
import re

import jax
import pytest
from tiny_runs import refused

from jdp.cli import main as cli
from jdp.cli.baseline import Baseline, HeldBytes, SentFrom, compare, read_baseline

PROGRAM = """\
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

print("a word of the user's")


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(w, x, *, rate):
    return w - rate * jax.grad(loss_fn)(w, x)


def make_step(devices=None):
    devices = jax.devices() if devices is None else devices
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    array = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    jitted = jax.jit(step, donate_argnums=0)
    arguments = (array((64, 64), P()), array((16, 64), P("data")), array((), P()))
    return lambda w, x, rate: jitted(w, x, rate=rate), arguments


def without_devices():
    return make_step()


def other_function():
    raise RuntimeError("no such file of mine")


def not_a_step():
    return {"step": step}


def too_few():
    called, (w, *_) = make_step()
    return called, (w,)


def needs(config):
    return make_step()
"""
WIRE = 2 * 7 / 8 * 64 * 64 * 4  # an all-reduce of w's gradient over 8 devices, by a ring


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A user's file in a repository of its own, which is the working directory."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "own_step.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path / "own_step.py"


def verify(capsys, *arguments):
    """Return (exit code, stdout, stderr)."""
    code = cli.main(["verify", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("name", ["own_step.py:make_step", "own_step.py:without_devices"])
def test_a_function_is_called_and_its_step_read(program, capsys, name):
    code, out, err = verify(capsys, name, "--target", "cpu:8", "--json")
    found = json.loads(out)  # what the user's file prints is on stderr
    assert (code, "a word of the user's" in err) == (0, True)
    assert (found["mesh"], found["target"]) == ({"data": 8}, "cpu:8")
    assert [(each["kind"], each["wire_bytes"]) for each in found["sent"]] == [("all-reduce", WIRE)]
    assert [each["path"] for each in found["memory"]["arguments"]] == ["w", "x", "rate"]


@pytest.mark.aot
def test_described_gpus_are_given_to_the_function(program, capsys):
    """They also answer for the cuDNN that it asks for, as of a model that is initialised by a call."""
    attend = 'lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn")'
    traced = f"jax.eval_shape({attend}, jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16))"
    program.write_text(PROGRAM.replace("    return jitted", f"    {traced}\n    return jitted", 1))
    code, out, _ = verify(capsys, "own_step.py:make_step", "--target", "h100:2x8", "--markdown")
    assert code == 0
    assert "on data=16 for `h100:2x8`" in out
    assert "| all-reduce | `own_step.py:10` | 30 KiB |" in out  # 2·15/16 of 16 KiB
    assert "| time of a step, simulated |" in out


def test_a_baseline_notices_a_line_that_sends_more(program, capsys):
    """Comment lines above move a line, which stays the same one; what a new line sends is worse."""
    code, out, _ = verify(capsys, "own_step.py:make_step", "--target", "cpu:8", "--save", "base.json")
    assert code == 0
    saved = read_baseline(program.parent / "base.json")
    (sent,) = saved.sent
    assert (sent.source, sent.text) == ("own_step.py:10", "return jnp.mean(jnp.tanh(x @ w) ** 2)")
    assert saved.step_seconds is None  # a CPU's rates are this machine's
    program.write_text("# a comment\n\n" + PROGRAM)
    code, out, _ = verify(capsys, "own_step.py:make_step", "--against", "base.json")  # the baseline's target
    assert (code, out.splitlines()[1]) == (0, "Equal to base.json.")
    code, out, _ = verify(capsys, "own_step.py:make_step", "--against", "base.json", "--markdown")
    assert (code, out.count("<details>"), out.partition("<details>")[0].count("|")) == (0, 1, 0)  # folded
    program.write_text(PROGRAM.replace("tanh(x @ w)", "tanh(x @ (w + x.T @ x))"))
    code, out, _ = verify(capsys, "own_step.py:make_step", "--against", "base.json", "--markdown")
    assert code == 1
    assert "WORSE than base.json by more than 2 %: sent a device, all-reduce at own_step.py:10" in out
    assert "| all-reduce | `own_step.py:10` | 28 KiB | 56 KiB | +100 % | **worse** |" in out
    assert verify(capsys, "own_step.py:make_step", "--against", "base.json", "--tolerance", "200%")[0] == 0


EQUINOX = """\
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
tx = optax.adam(1e-3)


def placed(tree, spec):
    place = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)) if hasattr(leaf, "shape") else leaf
    return jax.tree.map(place, tree)


@eqx.filter_jit(donate="all")
def step(model, opt_state, x):
    rows = lambda model: jax.lax.with_sharding_constraint(jax.vmap(model)(x), P("data"))
    grads = eqx.filter_grad(lambda model: jnp.mean(rows(model) ** 2))(model)
    updates, opt_state = tx.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state


def make_step():
    jax.set_mesh(mesh)  # which the constraint takes
    model = eqx.nn.Linear(32, 32, key=jax.random.key(0))
    state = placed((model, tx.init(eqx.filter(model, eqx.is_array))), P())
    return step, (*state, placed(jnp.ones((16, 32)), P("data")))
"""


def test_a_step_of_another_library(program, capsys):
    """Real arrays on the CPUs that stand for the target's devices; gradients of 32 · 32 + 32 numbers are summed."""
    program.write_text(EQUINOX)
    before = jax.sharding.get_mesh()
    try:
        code, out, err = verify(capsys, "own_step.py:make_step", "--target", "cpu:8", "--json")
    finally:
        jax.set_mesh(before)
    assert code == 0, err
    sent = sum(each["wire_bytes"] for each in json.loads(out)["sent"] if each["wire_bytes"] > 100)
    assert sent == pytest.approx(2 * 7 / 8 * 4 * (32 * 32 + 32), rel=0.01)


MISTAKES = {
    "no function": ("own_step.py", [], r'given "own_step.py": add :FUNCTION'),
    "an exception": (
        "own_step.py:other_function",
        [],
        r"could not be called:\n.*own_step.py\", line \d+, in other_function\n.*raise.*\n  RuntimeError: no such",
    ),
    "its devices": ("devices.py:make_step", [], "imported:\n(.*\n)*Put the code .* devices, under if __name__"),
    "no step": ("own_step.py:not_a_step", [], r"not_a_step must return \(jitted step, .*; given dict: return the step"),
    "too few": ("own_step.py:too_few", [], r"could not be compiled:\n(.*\n)*  TypeError: .* missing \d required"),
    "arguments": ("own_step.py:needs", [], r"given needs, which needs config: give config a default"),
    "a tolerance alone": ("own_step.py:make_step", ["--tolerance", "3%"], "is for --against; given 3% without"),
    "a tolerance": ("own_step.py:make_step", ["--tolerance", "2"], "--tolerance is a percentage; given .2.: write 2%"),
    "a key": ("own_step.py:make_step", ["--train.steps", "3"], "--train.steps is for an experiment; given the program"),
    "no baseline": ("own_step.py:make_step", ["--against", "nosuch.json"], "No such file or directory; write it with"),
    "another JSON": ("own_step.py:make_step", ["--against", "other.json"], "given .*: format: it should be 1; write"),
    "itself": ("own_step.py:make_step", ["--against", "a.json", "--save", "./a.json"], "--save would replace the"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error(program, capsys, name):
    (program.parent / "other.json").write_text('{"format": 2}')
    (program.parent / "devices.py").write_text('import jax; jax.devices(), jax.config.update("jax_num_cpu_devices", 3)')
    file, options, words = MISTAKES[name]
    assert re.search(words, refused(capsys, "verify", file, *options))


@pytest.mark.aot
def test_a_plan_of_one_target_is_the_report(program, capsys):
    assert cli.main(["plan", "own_step.py:make_step", "--target", "h100:1x8"]) == 0
    assert capsys.readouterr().out.startswith("step on data=8 for h100:1x8\nA device sends 28 KiB a step.\n")
    error = refused(capsys, "plan", "own_step.py:make_step", "--target", "h100:1x8", "--host-memory", "9")
    assert "--host-memory is for an experiment; given the program own_step.py:make_step" in error
    error = refused(capsys, "plan", "own_step.py:make_step", "--target", "h100:1x8,cpu:2")
    assert "a program is compiled for one --target; given h100:1x8,cpu:2: run jdp plan for each" in error


# Comparison, in numbers


def line(kind="all-reduce", source="a.py:1", text="f(x)", wire=1e6):
    return SentFrom(kind, source, text, 1, wire)


def baseline(*sent, total=10**9, seconds=1.0, fits=True, target="h100:8x8", jax="1"):
    held = HeldBytes(total, 0, 0, total, 0, fits)
    return Baseline(1, "a.py:f", target, jax, {"data": 64}, sent, held, seconds)


SECOND = functools.partial(line, source="a.py:2", text="g(x)")
CASES = {
    "equal": ([line()], {}, [line()], {}, "equal", []),
    "moved": ([line()], {}, [line(source="a.py:9")], {}, "equal", []),
    "edited": ([line()], {}, [line(text="g(x)", wire=2e6)], {}, "worse", ["sent a device", "all-reduce"]),
    "another kind": ([line()], {}, [line("all-gather")], {}, "worse", ["all-gather"]),
    "one up, all down": ([line(), SECOND(wire=5e6)], {}, [line(wire=2e6), SECOND(wire=1e6)], {}, "better", []),
    "a metric": ([line()], {}, [line(), line(source="a.py:7", text="h", wire=8)], {}, "changed", []),
    "memory": ([], {}, [], {"total": 1.03e9}, "worse", ["held a device"]),
    "time": ([], {}, [], {"seconds": 1.03}, "worse", ["time of a step, simulated"]),
    "time of a CPU": ([], {"seconds": None}, [], {"seconds": None}, "equal", []),
    "fits no more": ([], {}, [], {"total": 1.001e9, "fits": False}, "worse", ["more than a device has"]),
}


@pytest.mark.aot
@pytest.mark.parametrize("name", CASES)
def test_what_is_worse(name):
    old, old_settings, new, new_settings, verdict, worse = CASES[name]
    found = compare(baseline(*old, **old_settings), baseline(*new, **new_settings), tolerance=0.02, file="b.json")
    assert found.verdict == verdict
    assert [row.what for row in found.rows if row.verdict == "worse"] == worse


@pytest.mark.aot
def test_another_version_is_noted_another_target_refused():
    found = compare(baseline(jax="1"), baseline(jax="2"), tolerance=0.02, file="b.json")
    assert found.verdict == "equal" and found.notes[0].startswith("b.json was saved with jax 1, and this is jax 2: ")
    with pytest.raises(ValueError, match=r"given b.json of h100:8x8, and --target cpu:8: give --target h100:8x8, or"):
        compare(baseline(), baseline(target="cpu:8"), tolerance=0.02, file="b.json")
