"""Rewards and ends of episodes as functions of goals, of dynamics in JAX."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from polyak.core.goals import ACHIEVED, DESIRED, FLAGS, Goals, Outcomes, has_goals
from polyak.core.spaces import EnvSpec, zeros
from polyak.core.types import PyTree


@dataclass(frozen=True)
class JaxGoals(Goals):
    """The functions of goals of dynamics in JAX, for whole batches: `compute_reward(achieved, desired)`, and if they exist
    `compute_terminated` and `compute_truncated`.

    Attributes:
        dynamics: the dynamics.
    """

    is_python = False

    dynamics: Any

    def check(self) -> None:
        """Check the shapes and dtypes of the results; see `Goals.check`."""
        obs = self.dynamics.spec.obs
        jax.eval_shape(self.outcomes, *(zeros(obs.spaces[name], (2,)) for name in (ACHIEVED, DESIRED)))

    def outcomes(self, achieved: PyTree, desired: PyTree) -> Outcomes:
        """The results of the functions; see `Goals.outcomes`."""
        size = len(jax.tree.leaves(achieved)[0])
        arguments = [self._part(name).native_obs(goal) for name, goal in ((ACHIEVED, achieved), (DESIRED, desired))]

        def compute(name: str, kind: Any, wanted: str) -> Any:
            function = getattr(self.dynamics, name, None)
            if function is None:
                return None
            result = function(*arguments)
            if jnp.shape(result) != (size,) or not jnp.issubdtype(jnp.result_type(result), kind):
                got = f"{jnp.result_type(result)}{list(jnp.shape(result))}"
                raise ValueError(f"{self.dynamics.spec.id}: {name} must return {wanted} [{size}], got {got}")
            return result

        reward = compute("compute_reward", jnp.floating, "floats")
        return Outcomes(jnp.asarray(reward, jnp.float32), *(compute(name, jnp.bool_, "bools") for name in FLAGS))

    def _part(self, name: str) -> EnvSpec:
        return EnvSpec(self.dynamics.spec.obs.spaces[name], self.dynamics.spec.action)


def goals_of_dynamics(dynamics: Any) -> Goals | None:
    """The functions of goals of dynamics in JAX, or None if there are none."""
    is_goal_env = has_goals(dynamics.spec) and callable(getattr(dynamics, "compute_reward", None))
    return JaxGoals(dynamics) if is_goal_env else None
