"""Changes the networks and the replay of an agent by flags."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyak.cli.flags import UsageError
from polyak.cli.network_flags import NetworkFlags
from polyak.cli.replay_flags import ReplayFlags, changed_replay, flag_of
from polyak.core.spaces import Box, leaf_spaces
from polyak.core.types import Agent, RecurrentNetwork
from polyak.networks.actor_critic import ActorCritic, mlp, nature_cnn
from polyak.networks.q_network import QNetwork, is_noisy, q_mlp, q_nature_cnn
from polyak.networks.quantile_network import IQNetwork, iqn_mlp, iqn_nature_cnn
from polyak.networks.recurrent import RecurrentActorCritic, gru, lstm
from polyak.networks.recurrent_q import q_gru, q_lstm

ACTOR_CRITICS: Mapping[str, Any] = {"mlp": mlp, "cnn": nature_cnn, "lstm": lstm, "gru": gru}
Q_NETWORKS: Mapping[str, Any] = {"mlp": q_mlp, "cnn": q_nature_cnn, "lstm": q_lstm, "gru": q_gru}
NETWORKS: Mapping[type, Mapping[str, Any]] = {
    ActorCritic: ACTOR_CRITICS,
    RecurrentActorCritic: ACTOR_CRITICS,
    QNetwork: {kind: Q_NETWORKS[kind] for kind in ("mlp", "cnn")},
    IQNetwork: {"mlp": iqn_mlp, "cnn": iqn_nature_cnn},
}
"""Functions that make the networks of `--network`, by the type of the agent's present network."""

NETWORK_FIELDS = ("network", "actor", "critics")
"""Settings of agents that are networks."""


def change_parts(algorithm: str, agent: Agent, network_flags: NetworkFlags, replay_flags: ReplayFlags, env_steps: int) -> Agent:
    """The agent with the networks and the replay that flags set; with a recurrent network it learns from sequences.

    Raises:
        UsageError: the agent has no such setting, or would no longer explore.
    """
    if (network_flags, replay_flags) == (NetworkFlags(), ReplayFlags()):
        return agent
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}  # type: ignore[arg-type]
    networks = _changed_networks(algorithm, agent, network_flags)
    parts = dict(networks)
    if replay_flags != ReplayFlags() and "replay" not in fields:
        flags = [flag_of(f.name) for f in dataclasses.fields(replay_flags) if getattr(replay_flags, f.name) is not None]
        raise UsageError(f"{', '.join(flags)}: {algorithm} has no replay")
    if "replay" in fields:
        kind = "sequence" if isinstance(networks.get("network"), RecurrentNetwork) else None
        parts["replay"] = changed_replay(fields["replay"], replay_flags, kind, env_steps)
    changed: Any = dataclasses.replace(agent, **parts) if parts else agent  # type: ignore[type-var]
    # Rainbow explores by the noise of its network alone.
    if "network" in networks and is_noisy(fields["network"]) and not is_noisy(changed.network) and changed.epsilon == 0:
        raise UsageError("nothing explores without --noisy while --epsilon is 0; set it, e.g.: --epsilon linear:1:0.05:0.1")
    made: Agent = changed
    return made


def _changed_networks(algorithm: str, agent: Agent, network_flags: NetworkFlags) -> dict[str, Any]:
    """The networks of an agent with the settings that flags change, by its fields; none without flags.

    Raises:
        UsageError: the agent has no such setting.
    """
    changes = network_flags.changes()
    if not changes:
        return {}
    kind = changes.pop("network", None)
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}  # type: ignore[arg-type]
    networks: dict[str, Any] = {name: value for name, value in fields.items() if name in NETWORK_FIELDS and value is not None}
    if kind is not None and "network" not in fields:
        raise UsageError(f"--network {kind}: {algorithm} has an actor and critics, whose layers --hidden sets")
    if kind is not None:
        networks["network"] = _make_network(algorithm, kind, fields["network"], has_replay="replay" in fields)
    if "log_std" in changes and not any(isinstance(leaf, Box) for _, leaf in leaf_spaces(agent.spec.action)):
        raise UsageError(f"--log-std {changes['log_std']}: only Box actions have a standard deviation, got {agent.spec.action}")
    if "log_std" in changes and getattr(fields.get("actor"), "std", None) == "fixed":
        raise UsageError(f"--log-std {changes['log_std']}: {algorithm} has no distribution; --exploration-noise sets its noise")
    # By flag, the field that it sets.
    known = {name: {field.name: field.name for field in dataclasses.fields(network)} for name, network in networks.items()}
    if "critics" in known:
        known["critics"] |= {"value_hidden": "hidden", "value_activation": "activation"}
    unknown = [f"--{name.replace('_', '-')}" for name in changes if not any(name in names for names in known.values())]
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: {algorithm} has no such network setting")
    # --value-hidden comes after --hidden among the flags, so it decides the width of the critics.
    return {
        name: dataclasses.replace(
            network, **{known[name][flag]: value for flag, value in changes.items() if flag in known[name]}
        )
        for name, network in networks.items()
    }


def _make_network(algorithm: str, kind: str, present: Any, *, has_replay: bool) -> Any:
    """A network of this kind in place of the present one, with the same outputs.

    Args:
        has_replay: the agent has a replay, which gives a recurrent network sequences to learn from.

    Raises:
        UsageError: the agent has a network of another sort.
    """
    makers: Mapping[str, Any] = next((makers for sort, makers in NETWORKS.items() if isinstance(present, sort)), {})
    if has_replay and isinstance(present, QNetwork) and present.outputs is None:
        makers = Q_NETWORKS
    if kind not in makers:
        known = f"{{{','.join(makers)}}}" if makers else "no built-in network"
        raise UsageError(f"--network {kind}: {algorithm} takes {known}")
    made = makers[kind]()
    if isinstance(made, ActorCritic) and isinstance(present, ActorCritic):
        return dataclasses.replace(made, std=present.std)
    return dataclasses.replace(made, outputs=present.outputs) if isinstance(made, QNetwork) else made
