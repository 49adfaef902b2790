"""Policies that ignore the observation: uniform ones, and scripts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, PRNGKeyArray

from polyak.core.space_check import action_specs, check_range, read_leaves, to_array
from polyak.core.spaces import Box, EnvSpec, check_env_spec, leaf_spaces, needs_bounds, unflatten
from polyak.core.struct import static, struct
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.ops.distributions import Deterministic, Distribution
from polyak.ops.distributions.exploration import uniform_over
from polyak.policies.predict import NumPyMethods


@struct
class Uniform(NumPyMethods):
    """Every allowed action is as probable as any other.

    Attributes:
        spec: the spaces; a Box must have finite bounds.

    Raises:
        TypeError: `spec` is none.
        ValueError: a Box action without finite bounds.
    """

    spec: EnvSpec = static()

    def __post_init__(self) -> None:
        check_env_spec("Uniform", self.spec)
        for path, leaf in leaf_spaces(self.spec.action):
            if isinstance(leaf, Box) and not leaf.bounded:
                raise ValueError(f"Uniform: a Box {needs_bounds(leaf, path)}")

    def initial_state(self, batch_size: int) -> PyTree:
        """No carry."""
        return ()

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The uniform distribution over the allowed actions."""
        return uniform_over(self.spec, time_step.first.shape[0], time_step.action_mask), carry

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """A draw for each row."""
        return PolicyStep(self.distribution(time_step)[0].sample(seed=key), carry)


@struct
class Script:
    """A script as arrays.

    Attributes:
        ends: `[K]`, the step before which each part ends, counted from the episode's beginning.
        actions: the parts' actions, leaves `[K, ...]`.
        length: in steps.
    """

    ends: Int32[Any, " K"]
    actions: PyTree
    length: int = static()


@struct
class ScriptPosition:
    """The position of each environment in a script.

    Attributes:
        step: step of the episode, from 0.
        failed: an episode continued after the script's end.
        length: length of the script, in steps.
    """

    step: Int32[Array, " B"]
    failed: Bool[Array | np.ndarray, " B"]
    length: int = static()

    def failed_envs(self) -> Bool[Array | np.ndarray, " B"]:
        """True for environments whose episode continued after the script's end."""
        return self.failed

    def clear(self, envs: Bool[Array, " B"]) -> "ScriptPosition":
        """The same position, with no failure in these environments."""
        return dataclasses.replace(self, failed=jnp.asarray(self.failed) & ~envs)

    def error_message(self) -> str:
        """The error, with the length of the script and the environments whose episodes continued."""
        envs = np.flatnonzero(np.asarray(self.failed)).tolist()
        return (
            f"Scripted: the script has ended after its {self.length} steps, and environments {envs} went on; make it as long "
            "as the longest episode, or evaluate and collect no further"
        )


@struct
class Scripted(NumPyMethods):
    """A script of actions: each for a number of steps, from the beginning of every episode.

    An episode that continues after the script's end is an error. A step that only resets the environment does not count: its
    action is ignored. Compiled code cannot raise: there the last action is repeated, `ScriptPosition.failed` in the carry is
    set, and `evaluate`, `train.collect`, `predict` and the training loops raise a RuntimeError.

    Attributes:
        spec: the spaces.
        script: `[(repeat, action), ...]`, actions as agents choose them (Discrete from 0, Box within `spec.action_bounds`).

    Raises:
        TypeError: `spec` is none, or `script` is no such list.
        ValueError: the script is empty, a repeat is below 1, or an action does not fit the space.

    >>> from polyak.core.spaces import Box, Discrete
    >>> policy = Scripted(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), [(3, 0), (2, 1)])
    """

    spec: EnvSpec = static()
    script: Any = ()

    def __post_init__(self) -> None:
        check_env_spec("Scripted", self.spec)
        if not isinstance(self.script, Script):
            object.__setattr__(self, "script", _make_script(self.spec, self.script))

    def initial_state(self, batch_size: int) -> PyTree:
        """At the beginning."""
        return ScriptPosition(jnp.zeros(batch_size, jnp.int32), jnp.zeros(batch_size, bool), self.script.length)

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Deterministic, PyTree]:
        """All probability on the script's action; the position moves on."""
        step = jnp.where(time_step.first, 0, carry.step)
        ends = jnp.asarray(self.script.ends)
        over = step >= ends[-1]
        part = jnp.minimum(jnp.sum(step[:, None] >= ends[None], axis=1, dtype=jnp.int32), ends.shape[0] - 1)
        ignored = jnp.asarray(time_step.terminated) | jnp.asarray(time_step.truncated)
        # Constant after the end, so that it never wraps.
        carry = ScriptPosition(jnp.where(over, step, step + 1), carry.failed | (over & ~ignored), carry.length)
        return Deterministic(jax.tree.map(lambda x: jnp.asarray(x)[part], self.script.actions)), carry

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The script's action; the key is not used."""
        distribution, carry = self.distribution(time_step, carry)
        return PolicyStep(distribution.value, carry)


def _make_script(spec: EnvSpec, script: Any) -> Script:
    if not isinstance(script, list | tuple) or not all(isinstance(part, list | tuple) and len(part) == 2 for part in script):
        raise TypeError(f"Scripted: script must be a list of (repeat, action), got {script!r}")
    if not script:
        raise ValueError("Scripted: script must have at least one (repeat, action), got none")
    repeats = []
    for number, (repeat, _) in enumerate(script):
        if isinstance(repeat, bool) or not isinstance(repeat, int | np.integer) or repeat < 1:
            raise ValueError(f"Scripted: repeat of part {number} must be an integer >= 1, got {repeat!r}")
        repeats.append(int(repeat))
    ends = np.cumsum(repeats)
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"Scripted: script must have at most {np.iinfo(np.int32).max} steps, got {ends[-1]}")
    actions = [_action(spec, number, action) for number, (_, action) in enumerate(script)]
    return Script(ends.astype(np.int32), jax.tree.map(lambda *x: np.stack(x), *actions), int(ends[-1]))


def _action(spec: EnvSpec, number: int, action: Any) -> PyTree:
    name, specs, arrays = f"Scripted: action of part {number}", action_specs(spec), []
    for wanted, leaf in zip(specs, read_leaves(name, specs, action), strict=True):
        array = to_array(wanted.name(name), leaf, wanted.shape, wanted.dtype)
        check_range(wanted.name(name), array, wanted.low, wanted.high)
        arrays.append(array.astype(wanted.dtype))
    return unflatten(spec.action, arrays)
