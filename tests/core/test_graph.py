"""The one reader and runner of traced programs, on every kind of operation that runs others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.core.tracing.graph import (
    PLAIN,
    REMATERIALISED,
    after,
    before,
    bodies,
    closed,
    evaluate,
    known,
    read,
    run,
    run_bodies,
)
from jdp.core.tracing.graph import called as called_by
from jdp.core.tracing.jaxprs import bind, every_eqn, user_line

X = jnp.arange(1.0, 4.0)


@jax.custom_vjp
def own_gradient(x):
    return jnp.sin(x)


own_gradient.defvjp(lambda x: (own_gradient(x), x), lambda x, g: (g * x,))


def called(x):
    """Functions called in each way, each with a constant that has the shape of the others'."""
    x = jax.jit(lambda x: jax.nn.relu(x) * np.float32([1, 2, 3]))(x)
    x = jax.checkpoint(lambda x: own_gradient(x) + np.float32([4, 5, 6]))(x)
    return jax.jit(lambda x: jax.jit(lambda x: x - np.float32([7, 8, 9]))(x) / 2)(x)


def looped(x):
    total, parts = jax.lax.scan(lambda c, s: (c + s * x.sum(), c * 2), 0.0, x, reverse=True)
    ended = jax.lax.while_loop(lambda c: c.sum() < x.sum(), lambda c: c + x[0] + 1, x * 0)
    each = jax.vmap(lambda y: jax.lax.while_loop(lambda c: c < y, lambda c: c + y / 3, 0.0))(x)
    return total + jax.lax.cond(total > 0, jnp.sin, lambda p: p * ended, parts) + each


PROGRAMS = {"called": called, "looped": looped, "both": lambda x: looped(called(x) + 2)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_is_read_and_evaluated_gives_the_same(name):
    graph = read(jax.make_jaxpr(PROGRAMS[name])(X))
    env = dict(zip(graph.inputs, [X], strict=True))
    evaluate(graph.operations, env)
    np.testing.assert_array_equal(known(graph.outputs[0], env), PROGRAMS[name](X))
    assert all(
        bodies(each.eqn, each.operands) == [] or each.name in ("scan", "while", "cond") for each in graph.operations
    )
    assert [each.place for each in graph.operations] == list(range(len(graph.operations)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_run_with_a_hook_for_each_operation(name, monkeypatch):
    def doubled_sines(eqn, operands):
        if eqn.primitive.name == "sin":
            return [2 * x for x in bind(eqn, operands)]
        inner = bodies(eqn, operands, PLAIN | REMATERIALISED)
        functions = [lambda *args, program=program: run(program, args, doubled_sines) for program, _ in inner]
        if not inner:
            return run(called_by(eqn), operands, doubled_sines) if called_by(eqn) else bind(eqn, operands)
        return run_bodies(eqn, operands, functions)

    sin, program = jnp.sin, jax.make_jaxpr(PROGRAMS[name])(X)
    monkeypatch.setattr(jnp, "sin", lambda x: 2 * sin(x))
    np.testing.assert_allclose(run(program, [X], doubled_sines)[0], PROGRAMS[name](X), rtol=1e-6)


def test_what_leads_to_a_value_and_what_depends_on_it():
    graph = read(jax.make_jaxpr(lambda x, y: (jnp.sin(x) * 2 + y, jnp.cos(y)))(X, X))
    x, y = graph.inputs
    total, cosine = graph.outputs
    names = lambda operations: sorted(each.name for each in operations)  # noqa: E731
    assert names(before([total])[0]) == ["add", "mul", "sin"]
    assert set(before([cosine])[1]) == {y}
    assert names(after(graph.operations, [y])) == ["add", "cos"]
    product = total.maker.operands[0]
    assert before([total], lambda value: value is product)[0] == [total.maker]
    assert product.maker in after(graph.operations, [x])


def test_operations_keep_the_users_lines():
    program = jax.make_jaxpr(called)(X)
    again = jax.make_jaxpr(partial(run, program))([X])
    lines = [{(eqn.primitive.name, user_line(eqn)) for eqn in every_eqn(each.jaxpr)} for each in (program, again)]
    assert lines[0] == lines[1] and any(__file__ in line for _, line in lines[0])


def test_a_program_keeps_its_constants_when_it_is_asked_for_them_again():
    program = jax.make_jaxpr(lambda x: x + np.float32([7, 8, 9]))(X)
    assert closed(program) is program
    np.testing.assert_array_equal(run(closed(closed(program)), [X])[0], X + np.float32([7, 8, 9]))
