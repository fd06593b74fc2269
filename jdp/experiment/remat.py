"""`model.remat = "auto"`: the policy that keeps most of those with which the compiled step fits the devices' memory.

Policies are compiled in the order of `ladder`, each of which saves less time a byte than the next, until one fits. A
step that XLA's own rematerialisation had to change does not: it computes what was to be kept.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from jdp.base.disk_cache import Cache
from jdp.base.formatting import format_bytes
from jdp.base.notices import notice
from jdp.core.cluster.barrier import from_every_process
from jdp.experiment.plan import candidates_of
from jdp.experiment.schema.experiment import NONE, Experiment
from jdp.foresight.memory.peak import available_bytes
from jdp.foresight.program.compiled import CompileError
from jdp.foresight.targets.resolve import Target
from jdp.foresight.targets.this_machine import allocatable_bytes, target_of
from jdp.models import GPTConfig, ViTConfig
from jdp.models.configs.choices import AUTO, POLICIES

USED = 0.95
"""Of the memory that jax may take, what a step may: batches are read ahead, and the allocator's heap has gaps."""
_CHANGED = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+\.remat\w*(?:\.\d+)? = ", re.MULTILINE)


def ladder(experiment: Experiment) -> tuple[str, ...]:
    """Return the policies that "auto" stands for, those first that keep most; none where the file names a policy.

    "none" is not among those of stacked layers: writing and reading all of it takes longer than computing it again. On
    h100:1x8 gpt2_124m takes 45 ms in place of 39, and gpt_1b 306 in place of 274 (as simulated, jax 0.10.2).
    """
    config = experiment.model.config
    if not isinstance(config, GPTConfig | ViTConfig) or config.remat != AUTO:
        return ()
    return POLICIES if config.scan else (NONE, *POLICIES)


def with_policy(experiment: Experiment, policy: str) -> Experiment:
    """Return the experiment with another `model.remat`."""
    model = experiment.model.model_copy(update={"remat": None if policy == NONE else policy})
    return experiment.model_copy(update={"model": model})


def settled(experiment: Experiment, target: Target | None = None, cache: Cache | None = None) -> Experiment:
    """Return the experiment with a policy in place of "auto", the same on every process, and report it.

    `target` is by default this machine or cluster. The last policy is taken without compiling it. Devices without a
    memory of their own, as CPUs, keep everything.
    """
    policies, tried = ladder(experiment), list[str]()
    if not policies:
        return experiment
    target = target_of(None) if target is None else target
    limit = _limit(target)
    if limit is None:
        notice(f'model.remat = "{AUTO}" is "{NONE}" on {target}, whose devices have no memory of their own')
        return with_policy(experiment, NONE)
    for policy in policies[:-1]:
        chosen = with_policy(experiment, policy)
        needed, changed = _compiled(chosen, target, cache)
        fits = needed is not None and needed <= limit and not changed
        tried.append(_words(policy, needed, changed, limit))
        if all(said == "fits" for said in from_every_process("a choice of model.remat", "fits" if fits else "no")):
            break
    else:
        chosen = with_policy(experiment, policies[-1])
        tried.append(f'"{policies[-1]}" keeps least')
    notice(
        f'model.remat = "{AUTO}" is "{chosen.model.config.remat or NONE}": of {format_bytes(limit)} '
        f"that a step may take, {', '.join(tried)}"
    )
    return chosen


def _limit(target: Target) -> int | None:
    """Return the bytes that a step may take on a device; None where that is not known."""
    if target.config is not None or target.devices[0].platform == "cpu":
        return None if target.memory_bytes is None else int(USED * available_bytes(target.memory_bytes))
    own = [allocatable_bytes(each) for each in target.devices if each.process_index == jax.process_index()]
    return None if None in own or not own else int(USED * min(filter(None, own)))


def _compiled(experiment: Experiment, target: Target, cache: Cache | None) -> tuple[int | None, bool]:
    """Return the bytes of the compiled step, None if it does not compile; and whether XLA computes more again."""
    strategies, accumulate = [experiment.strategy], [experiment.train.accumulate]
    [candidate] = candidates_of(experiment, target, strategies=strategies, accumulate=accumulate, hybrid=False)
    try:
        if target.config is not None:
            compiled = candidate.compile(target, cache)
            return compiled.total_bytes, _CHANGED.search(compiled.text) is not None
        program = candidate.lower().compile()  # which the first step finds again, where programs are kept
    except (CompileError, jax.errors.JaxRuntimeError):  # XLA gives up on what is far too large
        return None, False
    sizes: Any = program.memory_analysis()
    needed = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    return needed - sizes.alias_size_in_bytes, _CHANGED.search(program.as_text() or "") is not None


def _words(policy: str, needed: int | None, changed: bool, limit: int) -> str:
    if needed is None:
        return f'"{policy}" does not compile'
    again = " and XLA computes parts of it again" if changed and needed <= limit else ""
    return f'"{policy}" needs {format_bytes(needed)}{again}'
