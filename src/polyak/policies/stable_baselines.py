"""A polyak policy with the interface of Stable-Baselines3's models, for its `evaluate_policy` and tools like it."""

from typing import Any

import jax
import numpy as np

from polyak.core.printing import short_repr
from polyak.core.types import PredictingPolicy, PyTree


@short_repr("_policy", "_seed")
class StableBaselinesPolicy:
    """Predicts as Stable-Baselines3's models do: `predict(obs, state, episode_start, deterministic) -> (action, state)`.

    Where the environment has action masks, `predict` takes `action_masks` as the models of sb3-contrib do.

    Args:
        policy: a polyak policy, also one that `load_policy` returned.
        seed: seed of the samples drawn with `deterministic=False`.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> from polyak.policies.scripted import Uniform
    >>> model = StableBaselinesPolicy(Uniform(EnvSpec(Box([0.0], [1.0]), Discrete(1))))
    >>> model.predict(np.zeros((2, 1), np.float32))[0]
    array([0, 0], dtype=int32)
    """

    def __init__(self, policy: PredictingPolicy, *, seed: int = 0) -> None:
        self._policy, self._seed, self._step = policy, seed, 0

    def predict(
        self,
        observation: Any,
        state: PyTree = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[Any, PyTree]:
        """The actions for a batch of observations (or for one), and the recurrent state, None for a policy without one.

        Args:
            state: the state that the previous call returned; None at the start.
            episode_start: `[N]` bool: where an episode begins, and the state is reset.
            action_masks: the allowed actions.
        """
        first = None if episode_start is None or state is None else np.asarray(episode_start, bool)
        # Exported policies take no masks.
        masks = {} if action_masks is None else {"action_mask": action_masks}
        if deterministic:
            action, carry = self._policy.predict(observation, state, first=first, **masks)
        else:
            key = jax.random.fold_in(jax.random.key(self._seed), self._step)
            self._step += 1
            action, carry = self._policy.predict(observation, state, deterministic=False, first=first, key=key, **masks)
        return action, carry if jax.tree.leaves(carry) else None
