"""A policy that also carries the recurrent state of critics, which a replay of sequences stores."""

from jaxtyping import PRNGKeyArray

from polyak.core.struct import struct
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.networks.unroll import reset_carry
from polyak.ops.distributions import Distribution
from polyak.policies.network_policy import NetworkPolicy
from polyak.policies.predict import PolicyWithSpec
from polyak.policies.wrapper import PolicyWrapper, check_policy, inner_predict


@struct
class WithCriticState(PolicyWrapper):
    """The inner policy; its carry is the inner carry as `actor`, and the recurrent state of critics as `critic`.

    Critics do not act, but learn from sequences that begin within an episode, and would begin there without the past that the
    actor remembers. So they see the observations while the policy collects, and the replay has their state too, as R2D2 stores
    the state of its only network (Kapturowski et al. 2019).

    Attributes:
        policy: the inner policy.
        critic: the critics' network without its head, with their variables; None for critics without recurrent state, whose
            carry is `()`.

    Raises:
        TypeError: `policy` is not a policy, or has no spec.
    """

    policy: PolicyWithSpec
    critic: NetworkPolicy | None

    def __post_init__(self) -> None:
        check_policy("WithCriticState", self.policy)

    def initial_state(self, batch_size: int) -> PyTree:
        """The inner carry, and the critics' initial state."""
        critic = () if self.critic is None else self.critic.initial_state(batch_size)
        return {"actor": self.policy.initial_state(batch_size), "critic": critic}

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree]:
        """The inner distribution, and both carries."""
        distribution, actor = self.policy.distribution(time_step, carry["actor"])
        return distribution, {"actor": actor, "critic": self._critic_state(time_step, carry["critic"])}

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The inner policy's step, and both carries."""
        step = self.policy.action(time_step, carry["actor"], key)
        carries = {"actor": step.carry, "critic": self._critic_state(time_step, carry["critic"])}
        return PolicyStep(step.action, carries, step.info)

    predict = inner_predict

    def _critic_state(self, time_step: TimeStep, carry: PyTree) -> PyTree:
        critic = self.critic
        if critic is None:
            return ()
        carry = reset_carry(critic.network, carry, time_step.first)
        _, carry, _ = critic.network.apply(critic.variables, critic.network_obs(time_step), carry)
        return carry
