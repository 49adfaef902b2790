"""The base of off-policy actor-critics: an actor and critics of actions in [-1, 1]."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.off_policy import OffPolicyAgent, OffPolicyState
from polyak.agents.settings import ViewSettings
from polyak.copies.follow import Follow
from polyak.copies.network_copies import NetworkCopies, cast_like, target_storage
from polyak.core.checks import check_created_with
from polyak.core.spaces import EnvSpec
from polyak.core.struct import choice, number, setting, static, struct
from polyak.core.types import Network, PyTree, RecurrentNetwork, Scalar, Variables, copy_buffers
from polyak.core.warn import warn
from polyak.learning.actor_critic_updates import check_actor, check_unit_actions, feedforward_or_default, recurrent_network
from polyak.learning.recurrent_replay import apply_critics, apply_to_batch, carry_of_one, check_sequences
from polyak.networks.actor import Actor
from polyak.networks.adapters import has_batch_statistics
from polyak.networks.critics import Critics
from polyak.networks.layers import has_images, is_narrow, warn_of_flat_images
from polyak.networks.pair import select_entries
from polyak.networks.recurrent import Recurrent
from polyak.networks.recurrent_critics import RecurrentCritics
from polyak.ops.distributions import for_space
from polyak.ops.schedules import Schedule, check_schedule
from polyak.ops.updates import soft_update
from polyak.policies.critic_state import WithCriticState
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy, P, add_return
from polyak.replay.sequences import SequenceObs


@struct
class ActorCriticCopies:
    """The networks of an agent with a deterministic actor.

    Attributes:
        actor: online, and a target if the critics' target acts by one.
        critics: N critics in one network, online and target.
        average: average of the actor, evaluated with `ema_tau`; else None.
    """

    actor: NetworkCopies
    critics: NetworkCopies
    average: Variables | None


@struct(kw_only=True)
class ActorCriticAgent(ViewSettings, OffPolicyAgent):
    """An agent with an actor and critics, whose Box actions lie in [-1, 1].

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them.
        actor: the network of the actor, which returns `(action_params, value)`.
        critics: the network of the critics, a function of `(obs, action)`.
        learning_rate: learning rate of the critics, and of the actor unless set separately; a number or a schedule such as
            `Linear`.
        actor_learning_rate: learning rate of the actor.
        shared_encoder: the actor sees images through the convolutions of the critics, which only the loss of the critics trains
            (Yarats et al. 2020, arXiv:1910.01741); False gives the actor its own.
        ema_tau: keep an average of the actor that moves by this fraction towards the online actor after every gradient step,
            and evaluate and export that average; None evaluates the online actor.
    """

    action_scaling: ClassVar[Literal["clip", "rescale"]] = "rescale"
    is_deterministic: ClassVar[bool] = False
    """True for an actor whose actions have no distribution."""

    actor: Network | None = static(default=None, kw_only=False)
    critics: Network | None = static(default=None, kw_only=False)
    actor_learning_rate: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    shared_encoder: bool = choice(default=False, choices=(True, False))
    ema_tau: Scalar | None = number(default=None, at_least=0, at_most=1, optional=True)

    def check_copies(self, copies: Any) -> None:
        """Check that copies were created with the agent's `ema_tau` too; see `OffPolicyAgent.check_copies`."""
        super().check_copies(copies)
        check_created_with(self, equal={}, present={"ema_tau": copies.average})

    def policy(self, state: OffPolicyState) -> Greedy:
        """The actor's action without noise, or the action of its average if there is one."""
        return Greedy(self.network_policy(state, self._evaluated_actor(state)))

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True for narrow layers and, on one device, small batches, of sequences all together; see `is_narrow`."""
        critics = self.critics
        widths = critics.layer_widths if isinstance(critics, Critics | Recurrent) else (np.inf,)
        samples = self.batch_size * self.replay.draw_length if devices == 1 else 1
        return is_narrow(self._actor, self.spec_of("actor"), samples, widths)

    def q_values(
        self, variables: Variables, obs: PyTree, action: PyTree, key: PRNGKeyArray | None = None
    ) -> Float[Array, "B N *M"]:
        """Q_i(s, a) of each critic, `[B, N]`, its quantiles, or its values of all Discrete actions.

        Args:
            key: with one, critics are in training mode, for dropout, unless they have batch normalization, which then uses its
                running statistics.
        """
        is_training = key is not None and not has_batch_statistics(variables)
        return apply_critics(self._critics, variables, self.seen_by("critic", obs), action, train=is_training, key=key)[0]

    def q_values_in_training(
        self, variables: Variables, obs: PyTree, action: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, "B N *M"], PyTree]:
        """Return `q_values` in training mode, with the batch's statistics, and the new statistics; for the critics' loss."""
        return apply_critics(self._critics, variables, self.seen_by("critic", obs), action, train=True, key=key)

    def deterministic_action(self, actor: Variables, obs: PyTree) -> PyTree:
        """π(s) in [-1, 1], tanh of the actor's mean."""
        (params, _), _ = apply_to_batch(self._actor, actor, self.seen_by("actor", obs))
        return for_space(self.spec.action, params, squash=True).mode()

    def deterministic_action_in_training(
        self, actor: Variables, obs: PyTree, key: PRNGKeyArray | None
    ) -> tuple[PyTree, PyTree]:
        """Return `deterministic_action` in training mode, and the new statistics; for the actor's loss."""
        (params, _), stats = apply_to_batch(self._actor, actor, self.seen_by("actor", obs), train=True, key=key)
        return for_space(self.spec.action, params, squash=True).mode(), stats

    def seen_by(self, name: Literal["actor", "critic"], obs: PyTree) -> PyTree:
        """The observations of a batch as the actor, or the critics, see them; of sequences with the stored recurrent state."""
        entries = self.views[name]
        if isinstance(obs, SequenceObs):
            return dataclasses.replace(obs, obs=select_entries(entries, obs.obs), carry=obs.carry[name])
        return select_entries(entries, obs)

    def initial_carry(self) -> PyTree:
        """The recurrent states of actor and critics in one environment, with a replay of sequences; else `()`."""
        return {"actor": carry_of_one(self.actor), "critic": carry_of_one(self.critics)} if self.replay.draws_sequences else ()

    def share_encoder(self, actor: Variables, critics: Variables) -> Variables:
        """The actor with the convolutions of the critics, without a gradient, where they share them; else the actor itself."""
        if not self.shared_encoder:
            return actor
        torso = {**actor.params["actor"], "encoder": jax.lax.stop_gradient(critics.params["encoder"])}
        return dataclasses.replace(actor, params={**actor.params, "actor": torso})

    def create_networks(
        self, key: PRNGKeyArray, actor_target: Follow | None, actor_spec: EnvSpec | None = None
    ) -> tuple[NetworkCopies, NetworkCopies, Variables | None]:
        """Copies of the actor and of the critics, with the states of their optimizers, and with `ema_tau` the actor's average.

        Args:
            actor_spec: the spec of the actor's network; None uses `spec_of("actor")`.

        Raises:
            TypeError, ValueError: the actor returns something else; see `check_actor`.
            ValueError: a network has batch normalization, and the replay draws sequences.
        """
        actor_key, critics_key = jax.random.split(key)
        actor_spec = self.spec_of("actor") if actor_spec is None else actor_spec

        def create(name: str, network: Network, key: PRNGKeyArray, spec: EnvSpec, target: Follow | None) -> NetworkCopies:
            copies = NetworkCopies.create(network, key, spec, optimizer=None, target=target, name=name)
            return copies.with_optimizer_state(self.optimizer_at())

        actor = create("actor", self._actor, actor_key, actor_spec, actor_target)
        critics = create("critics", self._critics, critics_key, self.spec_of("critic"), self.follow())
        check_actor(self._actor, actor.online, actor_spec)
        if self.replay.draws_sequences and (has_batch_statistics(actor.online) or has_batch_statistics(critics.online)):
            reason = "with a SequenceReplay, whose hidden steps would change its statistics"
            raise ValueError(f"{type(self).__name__}: networks must have no batch normalization {reason}")
        actor = dataclasses.replace(actor, online=copy_buffers(self.share_encoder(actor.online, critics.online)))
        average = None if self.ema_tau is None else target_storage(actor.online, Follow(tau=0.0))  # in float32
        return actor if actor.target is None else actor.update_target(), critics, average

    def update_average(self, average: Variables | None, actor: Variables, applied: Array) -> Variables | None:
        """The average after a gradient step: average + τ (actor - average) if the step was applied; None without `ema_tau`."""
        if average is None:
            return None
        tau = jnp.asarray(self.ema_tau, jnp.float32)
        return soft_update(actor, average, jnp.where(applied, tau, 0.0))

    def default_actor(self) -> Actor:
        """The actor where none is set, unless `set_defaults` takes another."""
        return Actor(std="fixed") if self.is_deterministic else Actor()

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.check_boxes()
        self.set_networks(self.default_actor(), Critics())

    def check_boxes(self) -> None:
        """Check the views, and that actions are Boxes in [-1, 1]."""
        self.set_views()
        check_unit_actions(type(self).__name__, self.spec)

    def set_networks(self, actor: Actor, critics: Critics) -> None:
        """Set the default networks where there are none; beside a built-in recurrent actor, critics have its kind of cell."""
        owner = type(self).__name__
        for name, default, spec in (("actor", actor, self.spec_of("actor")), ("critics", critics, self.spec_of("critic"))):
            given = getattr(self, name)
            if name == "critics" and given is None and isinstance(self.actor, Recurrent):
                given = dataclasses.replace(self.actor, head=critics)
            if self.takes_sequences and isinstance(given, RecurrentNetwork):
                network = recurrent_network(owner, name, given, default)
            else:
                network = feedforward_or_default(owner, name, given, default, has_unit_weights=self.has_unit_weights)
            if given is None:
                warn_of_flat_images(owner, name, network, spec)
            object.__setattr__(self, name, network)

    def set_outputs_of_critics(self, name: Literal["num_quantiles", "num_atoms"], outputs: int) -> None:
        """Set the number of outputs of the built-in critics, their field `name`, to the agent's.

        Raises:
            ValueError: the critics have another number.
        """
        network = self.critics
        critics = network.head if isinstance(network, Recurrent) else network
        if not isinstance(critics, Critics):
            return
        if getattr(critics, name) not in (None, outputs):
            raise ValueError(
                f"{type(self).__name__}: {name}={outputs} of the agent must equal the number of its critics, got "
                f"Critics({name}={getattr(critics, name)}); leave it None"
            )
        changes: dict[str, Any] = {name: outputs}
        critics = dataclasses.replace(critics, **changes)
        network = dataclasses.replace(network, head=critics) if isinstance(network, Recurrent) else critics
        object.__setattr__(self, "critics", network)

    def check_together(self) -> None:
        """Check settings that depend on each other.

        Warns of critics without a recurrent state that see no more than a recurrent actor, whose memory they cannot value.

        Raises:
            ValueError: settings contradict each other; the message names them.
        """
        super().check_together()
        owner = type(self).__name__
        if self.takes_sequences:
            check_sequences(owner, self.actor, self.replay, self.num_steps, name="actor")
        has_memory = [isinstance(network, RecurrentNetwork) for network in (self.actor, self.critics)]
        if has_memory == [True, False] and self.views["actor"] == self.views["critic"]:
            warn(
                f"{owner}: critics without a recurrent state see no more than the recurrent actor, and cannot value what it "
                f"remembers, got {self.critics!r}; set critics such as LSTM(head=Critics()), or critic_obs"
            )
        if isinstance(self.critics, RecurrentNetwork) and not isinstance(self.actor, RecurrentNetwork):
            raise ValueError(f"{owner}: critics must not be recurrent beside an actor that is not, got {self.critics!r}")
        if self.has_unit_weights and isinstance(self.actor, RecurrentNetwork):
            raise ValueError(f"{owner}: weight_norm must be False with recurrent networks, whose gates have a scale, got True")
        if self.shared_encoder:
            wanted = f"{owner}: shared_encoder must be False"
            if not (isinstance(self.actor, Actor) and isinstance(self.critics, Critics)):
                raise ValueError(f"{wanted} unless the networks are Actor and Critics, got {self.actor!r} and {self.critics!r}")
            if self.views["actor"] != self.views["critic"]:
                raise ValueError(f"{wanted} unless actor_obs and critic_obs are equal, got {self.views}")
            if not has_images(self.spec.obs):
                raise ValueError(f"{wanted} for observations without an image, got {self.spec.obs}")

    def _evaluated_actor(self, state: OffPolicyState) -> Variables:
        """The actor, or its average if there is one."""
        actor, average = state.copies.actor.evaluated(), state.copies.average
        if self.shared_encoder:
            # The optimizer of the actor does not train the encoder, so that an average of `schedule_free` is the critics'.
            actor = self.share_encoder(actor, state.copies.critics.evaluated())
        return actor if average is None or self.ema_tau is None else cast_like(average, actor)

    def network_policy(self, state: OffPolicyState, actor: Variables) -> NetworkPolicy:
        """The policy of an actor with these variables, such as the online actor, with the state's statistics."""
        normalizer, spec = state.normalizers.obs, self.spec_of("actor")
        normalizer = normalizer and normalizer.select_space(spec.obs)
        return NetworkPolicy(actor, normalizer, self._actor, spec, squash=True, is_deterministic=self.is_deterministic)

    def to_collect(self, policy: P, state: OffPolicyState) -> P | WithCriticState | DiscountedReturn:
        """A policy for collecting, with the state of critics for a replay of sequences, and with the return so far.

        The return is only there where rewards are divided by its standard deviation.
        """
        carried = WithCriticState(policy, self._critic_core(state)) if self.replay.draws_sequences else policy
        return add_return(carried, self)

    def _critic_core(self, state: OffPolicyState) -> NetworkPolicy | None:
        """The recurrent part of the critics as a policy that is only carried along; None for critics without one."""
        if not isinstance(self.critics, RecurrentCritics):
            return None
        normalizer, spec = state.normalizers.obs, self.spec_of("critic")
        variables, normalizer = state.copies.critics.online, normalizer and normalizer.select_space(spec.obs)
        return NetworkPolicy(variables, normalizer, self.critics.core, spec)

    @property
    def has_unit_weights(self) -> bool:
        """True if gradient steps keep the weight vectors of dense layers on unit spheres."""
        return False

    @property
    def _actor(self) -> Network:
        assert self.actor is not None, "set_defaults sets it"
        return self.actor

    @property
    def _critics(self) -> Network:
        assert self.critics is not None, "set_defaults sets it"
        return self.critics
