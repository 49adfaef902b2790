"""The base of agents that learn from each rollout once it is collected, by a network of a policy and its value."""

from typing import Any, Literal

from polyak.agents.agent import BaseAgent
from polyak.agents.settings import AdamSettings, NormalizationSettings
from polyak.core.spaces import EnvSpec
from polyak.core.struct import choice, integer, number, static, struct
from polyak.core.types import Network, Scalar


@struct(kw_only=True)
class OnPolicyAgent(AdamSettings, NormalizationSettings, BaseAgent):
    """An actor-critic that learns from rollouts, for Discrete, MultiDiscrete, MultiBinary and Box actions, and trees of them.

    Attributes:
        spec: the environment's spaces (`env.spec`).
        network: an actor-critic network that returns `(action_params, value)`; None takes `network_for(spec)`. It is applied
            in evaluation mode.
        num_steps: rollout length T, in steps of each environment.
        gamma: discount per step.
        gae_lambda: trace decay λ of GAE; 0 is the one-step error, 1 the return up to the end of the rollout.
        ent_coef: coefficient of the entropy bonus.
        vf_coef: coefficient of the value loss.
        normalize_reward: divide rewards by the running standard deviation of the discounted `"return"` or of the `"reward"`;
            None leaves rewards unchanged.
        clip_reward: clip normalized rewards to ± this value; None disables clipping.
        squash: sample Box actions from a tanh-transformed normal distribution; the spec must rescale actions to their bounds.
        max_skipped_updates: stop training after this many consecutive updates without a finite gradient step of a network.
    """

    spec: EnvSpec = static(kw_only=False)
    network: Network | None = static(default=None, kw_only=False)
    num_steps: int = integer(default=256)
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    gae_lambda: Scalar = number(default=0.95, at_least=0, at_most=1)
    ent_coef: Scalar = number(default=0.0, at_least=0)
    vf_coef: Scalar = number(default=0.5, at_least=0)
    normalize_reward: Literal["return", "reward"] | None = choice(default=None, choices=("return", "reward", None))
    clip_reward: Scalar | None = number(default=10.0, above=0, optional=True, used_if=("normalize_reward", ...))
    squash: bool = choice(default=False, choices=(True, False))
    max_skipped_updates: int = integer(default=10)
    max_grad_norm: Scalar | None = 0.5
    adam_eps: Scalar = 1e-5

    @property
    def _network(self) -> Any:
        assert self.network is not None, "__post_init__ sets the default"
        return self.network
