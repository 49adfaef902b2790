"""An actor-critic network made of two networks, which may see different entries of the observation."""

from typing import Any

import jax
from jaxtyping import Array, Bool, PRNGKeyArray

from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.networks.unroll import unroll


@struct(kw_only=True)
class ActorAndCritic:
    """An actor and a critic without shared layers, as one network that returns `(action_params, value)`.

    On-policy agents with `actor_obs` or `critic_obs` make it of a built-in network. Two networks of other kinds or sizes, or of
    your own, are given one by one: `ActorAndCritic(MLP((32, 32)), FlaxNNX(make_critic))`.

    Attributes:
        actor: a network that returns `(action_params, value)`, the value unused; None: an agent takes `NatureCNN` for images,
            else `MLP`.
        critic: a network that returns `(action_params, value)`, the parameters unused; None: an agent takes its own.
        actor_obs: entries of the observation that the actor sees; None: all. An agent sets its own.
        critic_obs: entries of the observation that the critic sees; None: all. An agent sets its own.

    Raises:
        ValueError: from `init`, if a network is missing or recurrent; on-policy agents fill and accept both.
    """

    actor: Network | None = static(default=None, kw_only=False)
    critic: Network | None = static(default=None, kw_only=False)
    actor_obs: tuple[str, ...] | None = static(default=None)
    critic_obs: tuple[str, ...] | None = static(default=None)

    @property
    def parts(self) -> dict[str, tuple[Any, tuple[str, ...] | None]]:
        """Both networks with the entries that they see."""
        return {"actor": (self.actor, self.actor_obs), "critic": (self.critic, self.critic_obs)}

    @property
    def layer_widths(self) -> tuple[int, ...] | None:
        """Widths of the dense layers of both networks; None if one of them does not say them."""
        of_actor, of_critic = (getattr(network, "layer_widths", None) for network, _ in self.parts.values())
        return None if of_actor is None or of_critic is None else (*of_actor, *of_critic)

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables for the spec's spaces."""
        for name, (network, _) in self.parts.items():
            if network is None or (isinstance(network, RecurrentNetwork) and not isinstance(self, RecurrentNetwork)):
                wanted = "a network without recurrent state outside of on-policy agents"
                raise ValueError(f"ActorAndCritic: {name} must be {wanted}, got {network!r}")
        keys = jax.random.split(key)
        made = {
            name: network.init(key, spec.select_entries(entries))
            for (name, (network, entries)), key in zip(self.parts.items(), keys, strict=True)
        }
        params, stats = ({name: getattr(part, field) for name, part in made.items()} for field in ("params", "stats"))
        return Variables(params, stats, graph=tuple((name, part.graph) for name, part in made.items()))

    def variables_of(self, name: str, variables: Variables) -> Variables:
        """The variables of the network `"actor"` or `"critic"`."""
        return Variables(variables.params[name], variables.stats[name], dict(variables.graph)[name])

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((action_params, value), carry, stats)` for obs leaves `[B, ...]`."""
        outs, carries, stats = {}, {}, {}
        for number, (name, (network, entries)) in enumerate(self.parts.items()):
            outs[name], carries[name], stats[name] = network.apply(
                self.variables_of(name, variables),
                select_entries(entries, obs),
                carry[name] if carry else (),
                train=train,
                key=None if key is None else jax.random.fold_in(key, number),
            )
        return (outs["actor"][0], outs["critic"][1]), carries if isinstance(self, RecurrentNetwork) else (), stats


@struct(kw_only=True)
class RecurrentActorAndCritic(ActorAndCritic):
    """An `ActorAndCritic` of which one network, or each, is recurrent."""

    def initial_carry(self, batch_size: int) -> PyTree:
        """The carry of `actor` and of `critic`; `()` for one that is not recurrent."""
        return {
            name: network.initial_carry(batch_size) if isinstance(network, RecurrentNetwork) else ()
            for name, (network, _) in self.parts.items()
        }


@unroll.register(RecurrentActorAndCritic)
def _unroll(
    network: RecurrentActorAndCritic, variables: Variables, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """`unroll` of each network, with one that is not recurrent applied to all steps at once."""
    outs, carries = {}, {}
    for name, (part, entries) in network.parts.items():
        variables_of_part, seen = network.variables_of(name, variables), select_entries(entries, obs)
        if isinstance(part, RecurrentNetwork):
            outs[name], carries[name] = unroll(part, variables_of_part, seen, first, carry[name] if carry else ())
        else:
            rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)
            out, carries[name], _ = part.apply(variables_of_part, rows)
            outs[name] = jax.tree.map(lambda x: x.reshape(*first.shape, *x.shape[1:]), out)
    return (outs["actor"][0], outs["critic"][1]), carries


def select_entries(entries: tuple[str, ...] | None, obs: Any) -> Any:
    """These entries of an observation; None for all."""
    return obs if entries is None else {name: obs[name] for name in entries}
