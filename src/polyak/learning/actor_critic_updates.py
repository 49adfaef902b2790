"""Functions shared by off-policy actor-critics: checks of networks and actions; terms and logs of their gradient steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import PROBE_ROWS, Box, EnvSpec, in_action, leaf_spaces, needs_bounds, zeros
from polyak.core.types import Network, PyTree, RecurrentNetwork, Terms, Variables
from polyak.networks.actor import Actor
from polyak.networks.actor_critic import check_blocks
from polyak.networks.adapters import check_network
from polyak.networks.critics import Critics
from polyak.networks.feedforward import BuiltInNetwork, policy_settings
from polyak.networks.recurrent import Recurrent
from polyak.networks.recurrent_critics import RecurrentCritics
from polyak.ops.distributions import for_space
from polyak.ops.gradient_step import StepLog, in_float32
from polyak.ops.losses import weighted_sum


def check_unit_actions(
    owner: str, spec: EnvSpec, instead: str = "SAC, DQN and PPO take Discrete actions", also: str = ""
) -> None:
    """Check that an agent's actions are Boxes in [-1, 1].

    Args:
        instead: advice for actions that are no Boxes, for the error.
        also: other actions that the agent takes, for the error.

    Raises:
        ValueError: a part of the actions is something else; the message names the part.
    """
    for path, leaf in leaf_spaces(spec.action):
        where = in_action(path)
        if not isinstance(leaf, Box) or leaf.dtype.kind != "f":
            advice = "PPO, A2C and IMPALA take Boxes of integers" if isinstance(leaf, Box) else instead
            kind = "Boxes of floats" if isinstance(leaf, Box) else "Boxes"
            raise ValueError(f"{owner}: actions must be {kind}{also}, got {leaf}{where}; {advice}")
        if not leaf.bounded:
            raise ValueError(f"{owner}: a Box {needs_bounds(leaf, path)}")
        low, high = spec.action_bounds(leaf)
        if not (np.all(low == -1) and np.all(high == 1)):
            raise ValueError(
                f"{owner}: actions must lie in [-1, 1], got {leaf}{where}; make the environment with "
                f"polyak.envs.make(..., action_scaling='rescale'), on the command line --action-scaling rescale"
            )


def action_dimensions(spec: EnvSpec) -> int:
    """Number of dimensions of an action, dim A."""
    return sum(int(np.prod(leaf.shape)) for _, leaf in leaf_spaces(spec.action))


def feedforward_or_default(owner: str, name: str, network: Any, default: Network, *, has_unit_weights: bool = False) -> Network:
    """Return the network of the setting `name`, or the default network for None.

    Args:
        has_unit_weights: gradient steps keep the norm of weight vectors, which `"hypersphere"` blocks need.

    Raises:
        TypeError: the value is no network.
        ValueError: the network is recurrent; the actor returns action values; the critics are an actor; the actor squashes
            its mean, although the agent bounds actions itself; or its blocks need unit weights.
    """
    network = default if network is None else check_network(owner, network, name)
    check_role(owner, name, network)
    if isinstance(network, RecurrentNetwork):
        raise ValueError(f"{owner}: {name} must not be recurrent, got {network!r}; PPO, DQN, SAC and TD3 train recurrent ones")
    if not has_unit_weights:
        check_blocks(owner, name, network)
    return network


def recurrent_network(owner: str, name: str, network: RecurrentNetwork, default: Actor | Critics) -> Network:
    """Return the recurrent network of the setting `name`; a built-in one without a head gets the default network as its head.

    Raises:
        TypeError: the value is a class, not an instance.
        ValueError: as `check_role`, and for critics that are no `RecurrentCritics`.
    """
    check_network(owner, network, name)
    if isinstance(network, Recurrent) and network.head is None:
        network = dataclasses.replace(network, head=default)
    if name == "critics" and not isinstance(network, RecurrentCritics):
        raise ValueError(f"{owner}: recurrent critics must have core and critic_values, such as LSTM(), got {network!r}")
    check_role(owner, name, network)
    return network


def check_role(owner: str, name: str, network: Network) -> None:
    """Check that a built-in network returns what the setting `name` is for.

    Raises:
        ValueError: the actor returns action values; the critics are an actor; or the actor squashes its mean, although the
            agent bounds actions itself.
    """
    settings = policy_settings(network)
    has_critics = isinstance(network, Critics) or (isinstance(network, Recurrent) and isinstance(network.head, Critics))
    if name != "critics" and settings is None and (has_critics or isinstance(network, BuiltInNetwork)):
        raise ValueError(f"{owner}: {name} must return (action_params, value), such as Actor(), got {network!r}")
    if name == "critics" and (settings is not None or (isinstance(network, BuiltInNetwork) and not has_critics)):
        raise ValueError(f"{owner}: critics must return (q, None) of (obs, action), such as Critics(), got {network!r}")
    if settings is not None and settings.squash_mean:
        raise ValueError(f"{owner}: the {name}'s squash_mean must be False, as the agent bounds actions itself; got True")


def check_actor(network: Network, variables: Variables, spec: EnvSpec) -> None:
    """Check that an actor returns `(action_params, value)` for the actions of the spec; nothing is computed.

    Raises:
        TypeError: the actor returns something else.
        ValueError: the parameters do not fit the action's distribution; the message names the part.
    """
    obs = _example(spec.obs)
    out = jax.eval_shape(lambda v, x: network.apply(v, x)[0], variables, obs)
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"network: an actor must return (action_params, value), value may be None; got {_shapes(out)}")
    try:
        jax.eval_shape(lambda params: for_space(spec.action, params).mode(), out[0])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"network: the actor's action_params do not fit {spec.action}: {error}") from error


def check_critics(network: Network, variables: Variables, spec: EnvSpec, *, outputs: int | None = None) -> int:
    """The number N of critics, after a check that `apply(variables, (obs, action))` returns `(q, None)`, q float32 `[B, N]`.

    Args:
        outputs: numbers of each critic, M quantiles or the values of M Discrete actions, where q is `[B, N, M]`.

    Raises:
        TypeError: the critics return something else, or q of another precision.
        ValueError: q has another shape.
    """
    inputs = _example(spec.obs), in_float32(_example(spec.action))
    out = jax.eval_shape(lambda v, x: network.apply(v, x)[0], variables, inputs)
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], jax.ShapeDtypeStruct)):
        raise TypeError(f"network: critics must return (q, None), got {_shapes(out)}")
    q = out[0]
    wanted, last = ("[B, N]", ()) if outputs is None else (f"[B, N, {outputs}]", (outputs,))
    if q.ndim != 2 + len(last) or q.shape[0] != PROBE_ROWS or q.shape[2:] != last:
        raise ValueError(f"network: q of B = {PROBE_ROWS} observations must have shape {wanted}, got {list(q.shape)}")
    if q.dtype != jnp.float32:
        raise TypeError(f"network: q must be float32 (a network of another precision casts it), got {q.dtype}")
    return q.shape[1]


def check_num_target_critics(owner: str, num_target_critics: int | None, num_critics: int) -> None:
    """Check that at most `num_critics` critics are sampled for a target.

    Raises:
        ValueError: `num_target_critics` is larger.
    """
    if num_target_critics is not None and num_target_critics > num_critics:
        raise ValueError(
            f"{owner}: num_target_critics must be at most the number of critics, {num_critics}, got {num_target_critics}"
        )


def min_of_critics(q: Float[Array, "B N *M"], num_sampled: int | None, key: PRNGKeyArray) -> Float[Array, "..."]:
    """min_i over all critics, or over `num_sampled` random critics, the same for all samples of a device's batch (REDQ)."""
    if num_sampled is not None:
        q = jax.random.choice(key, q, (num_sampled,), replace=False, axis=1)
    return jnp.min(q, axis=1)


def critic_terms(q: Float[Array, "B N"], td_error: Float[Array, "B N"], weight: Float[Array, " B"]) -> Terms:
    """The terms of a critics' loss; `priority` is the mean |δ| of each sample."""
    q, td_error = jax.lax.stop_gradient((q, td_error))
    size = jnp.mean(jnp.abs(td_error), axis=1)
    return {"td_error": weighted_sum(size, weight), "q": weighted_sum(jnp.mean(q, axis=1), weight), "priority": size}


def train_every(
    delay: int, critics: NetworkCopies, critic_log: StepLog, train: Callable[[PyTree, Bool[Array, ""]], Any], copies: PyTree
) -> Any:
    """Call `train(copies, enabled)`, which returns copies and a log, after every `delay`-th gradient step of the critics.

    After the other steps nothing is computed: the copies are unchanged, and the log has a step that was not applied.
    """
    enabled = critic_log.applied & (critics.steps % jnp.uint32(delay) == 0)
    if delay == 1:
        return train(copies, enabled)  # No branch: a GPU waits for its condition.

    def skip(copies: PyTree) -> Any:
        _, log = jax.eval_shape(train, copies, enabled)
        return copies, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), log)

    return jax.lax.cond(enabled, lambda copies: train(copies, jnp.array(True)), skip, copies)


def join_logs(**logs: StepLog) -> StepLog:
    """Join the logs of the gradient steps of several networks; terms get the network's name, `actor_loss`.

    A network whose step was skipped or disabled has NaN in its terms; means over the steps leave NaN out.
    """
    terms: Terms = {}
    for name, log in logs.items():
        named = {f"{name}_{term}" if term in ("loss", "grad_norm") else term: value for term, value in log.terms.items()}
        terms |= {term: jnp.where(log.applied, value, jnp.nan) if value.ndim == 0 else value for term, value in named.items()}
    bad, applied, skipped = (jnp.stack([getattr(log, name) for log in logs.values()]) for name in ("bad", "applied", "skipped"))
    return StepLog(terms, jnp.any(bad, axis=0), applied, skipped)


def append_logs(log: StepLog, last: StepLog) -> StepLog:
    """The log of several networks, as of `join_logs`, with the logs of more of them."""
    applied, skipped = (jnp.append(getattr(log, name), getattr(last, name)) for name in ("applied", "skipped"))
    return StepLog(log.terms | last.terms, log.bad | last.bad, applied, skipped)


def _example(space: Any) -> PyTree:
    return jax.tree.map(jnp.asarray, zeros(space, (PROBE_ROWS,)))


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.shape, tree)
