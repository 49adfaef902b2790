"""Changes the networks and the replay of an agent by flags."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from polyak.cli.flags import UsageError
from polyak.cli.network_flags import NetworkFlags
from polyak.cli.replay_flags import ReplayFlags, changed_replay, flag_name
from polyak.core.spaces import Box, leaf_spaces
from polyak.core.types import Agent, RecurrentNetwork
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.networks.feedforward import MLP, BuiltInNetwork, NatureCNN, policy_settings
from polyak.networks.heads import PolicyAndValue, PolicyOnly, QValues
from polyak.networks.q_network import is_noisy
from polyak.networks.recurrent import GRU, LSTM, Recurrent
from polyak.replay.sequences import SequenceReplay

FEEDFORWARD: Mapping[str, type[BuiltInNetwork]] = {"mlp": MLP, "cnn": NatureCNN}
NETWORKS: Mapping[str, type[BuiltInNetwork]] = {**FEEDFORWARD, "lstm": LSTM, "gru": GRU}
"""The networks of `--network`."""

STEPS_WITH_ONE_STATE = 8
"""Steps of an environment for which a new replay of sequences stores one recurrent state, which may need more than a row."""

NETWORK_FIELDS = ("network", "actor", "critics")
"""Settings of agents that are networks."""


def change_parts(
    algorithm: str,
    agent: Agent,
    network_flags: NetworkFlags,
    replay_flags: ReplayFlags,
    env_steps: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    num_envs: int = 0,
) -> Agent:
    """Return the agent with the networks and the replay set by flags; a recurrent network implies a replay of sequences.

    Args:
        settings: the settings that flags set.
        num_envs: with a new recurrent network, whose minibatches are whole environments, `num_minibatches` becomes its largest
            divisor that divides this number too, unless it is among the settings. With a replay, which stores a recurrent state
            every `num_steps` steps, a `num_steps` of 1 becomes 8, or fewer if the replay needs it. 0 keeps both.

    Raises:
        UsageError: the agent has no such setting, or would no longer explore.
    """
    if (network_flags, replay_flags) == (NetworkFlags(), ReplayFlags()):
        return agent
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}  # type: ignore[arg-type]
    networks = _changed_networks(algorithm, agent, network_flags)
    parts = dict(networks)
    if replay_flags != ReplayFlags() and "replay" not in fields:
        flags = [flag_name(f.name) for f in dataclasses.fields(replay_flags) if getattr(replay_flags, f.name) is not None]
        raise UsageError(f"{', '.join(flags)}: {algorithm} has no replay")
    if "replay" in fields:
        kind = "sequence" if any(isinstance(network, RecurrentNetwork) for network in networks.values()) else None
        parts["replay"] = replay = changed_replay(fields["replay"], replay_flags, kind, env_steps)
        is_new = num_envs > 0 and network_flags.network is not None and "num_steps" in fields.keys() - settings.keys()
        if is_new and isinstance(replay, SequenceReplay) and fields["num_steps"] == 1:
            parts["num_steps"] = count = _steps_with_one_state(replay)
            print(f"num_steps={count}: the replay stores a recurrent state every {count} steps")
    if "num_minibatches" in fields.keys() - settings.keys() and isinstance(networks.get("network"), RecurrentNetwork):
        parts["num_minibatches"] = count = math.gcd(fields["num_minibatches"], num_envs)
        if count != fields["num_minibatches"]:
            print(f"num_minibatches={count}: minibatches of a recurrent network are whole environments, of {num_envs}")
    changed: Any = dataclasses.replace(agent, **parts) if parts else agent  # type: ignore[type-var]
    # Rainbow explores only by the noise of its network.
    if "network" in networks and is_noisy(fields["network"]) and not is_noisy(changed.network) and changed.epsilon == 0:
        raise UsageError("nothing explores without --noisy while --epsilon is 0; set it, e.g.: --epsilon linear:1:0.05:0.1")
    made: Agent = changed
    return made


def _steps_with_one_state(replay: SequenceReplay) -> int:
    """The largest `num_steps` up to 8 for this capacity and these sequences."""
    most = min(STEPS_WITH_ONE_STATE, replay.sequence_length - replay.burn_in)
    return next(count for count in range(most, 0, -1) if replay.capacity % count == 0)


def _changed_networks(algorithm: str, agent: Agent, network_flags: NetworkFlags) -> dict[str, Any]:
    """Return the changed networks of an agent, by field; empty without flags.

    Raises:
        UsageError: the agent has no such setting.
    """
    changes = network_flags.changes()
    if not changes:
        return {}
    kind = changes.pop("network", None)
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}  # type: ignore[arg-type]
    networks: dict[str, Any] = {name: value for name, value in fields.items() if name in NETWORK_FIELDS and value is not None}
    cores = {name: network for name, network in networks.items() if isinstance(network, Recurrent) and name != "network"}
    networks |= {name: core.head for name, core in cores.items()}
    if kind is not None and "network" not in fields:
        cores = _make_cores(algorithm, agent, kind, networks)
        kind = None
    if kind is not None:
        networks["network"] = _make_network(algorithm, kind, fields["network"], has_replay="replay" in fields)
    if "log_std" in changes and not any(isinstance(leaf, Box) for _, leaf in leaf_spaces(agent.spec.action)):
        raise UsageError(f"--log-std {changes['log_std']}: only Box actions have a standard deviation, got {agent.spec.action}")
    actor = policy_settings(fields.get("actor"))
    if "log_std" in changes and actor is not None and actor.std == "fixed":
        raise UsageError(f"--log-std {changes['log_std']}: {algorithm} has no distribution; --exploration-noise sets its noise")
    policy = policy_settings(fields.get("network"))
    if "log_std" in changes and policy is not None and policy.std == "fixed":
        raise UsageError(f"--log-std {changes['log_std']}: the flow of --flow-steps has no standard deviation; remove one")
    known = {name: _fields_by_flag(network) for name, network in networks.items()}
    if "actor" in known:
        known["actor"].pop("norm", None)  # --norm belongs to the critics.
    unknown = [f"--{name.replace('_', '-')}" for name in changes if not any(name in names for names in known.values())]
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: {algorithm} has no such network setting")
    # --value-hidden comes after --hidden among the flags, so it decides the width of the critics.
    changed = {
        name: _replace(network, {known[name][flag]: value for flag, value in changes.items() if flag in known[name]})
        for name, network in networks.items()
    }
    return changed | {name: _replace_head(core, changed[name], known[name], changes) for name, core in cores.items()}


def _replace_head(core: Recurrent, head: Any, fields: Mapping[str, str], changes: Mapping[str, Any]) -> Recurrent:
    """Return the recurrent network with this head; a changed activation counts for the layers before the cell too."""
    is_changed = any(fields.get(flag) == "activation" for flag in changes)
    return dataclasses.replace(core, head=head, **({"activation": head.activation} if is_changed else {}))


def _make_cores(algorithm: str, agent: Any, kind: str, networks: Mapping[str, Any]) -> dict[str, Recurrent]:
    """Return recurrent networks, without a head, for an actor and for critics, which become their heads.

    Raises:
        UsageError: the agent takes no sequences, has networks of the user's own, or the kind is not recurrent.
    """
    cell, takes_sequences = NETWORKS[kind], getattr(agent, "takes_sequences", False)
    if not takes_sequences or not issubclass(cell, Recurrent):
        also = "; --network lstm or gru puts a cell before them" if takes_sequences else ""
        raise UsageError(f"--network {kind}: {algorithm} has {' and '.join(networks)}, whose layers --hidden sets{also}")
    if not (isinstance(networks["actor"], Actor) and isinstance(networks["critics"], Critics)):
        raise UsageError(f"--network {kind}: actor and critics must be built-in, Actor and Critics, to get a cell")
    return {"actor": cell(), "critics": cell()}


def _fields_by_flag(network: Any) -> dict[str, str]:
    """Return the fields of a network and of its head, by the flag that sets the field."""
    head = dataclasses.fields(network.head) if isinstance(network, BuiltInNetwork) and network.head else ()
    names = {field.name: field.name for field in (*dataclasses.fields(network), *head)}
    return names | ({"value_hidden": "hidden", "value_activation": "activation"} if isinstance(network, Critics) else {})


def _replace(network: Any, changes: Mapping[str, Any]) -> Any:
    """Return the network with other values for its fields, or for fields of its head."""
    own = {name: changes[name] for name in changes if name in network.__dataclass_fields__}
    of_head = {name: changes[name] for name in changes if name not in own}
    if own.get("residual") in ("hypersphere", "inverted"):
        # The blocks have their own normalization and initial weights, an actor alone orthogonal ones.
        plain = {"norm": None, "norm_inputs": False, "norm_before": "activation", "orthogonal": False}
        own = {name: value for name, value in plain.items() if name in network.__dataclass_fields__} | own
    if of_head:
        own["head"] = dataclasses.replace(network.head, **of_head)
    return dataclasses.replace(network, **own)


def _make_network(algorithm: str, kind: str, present: Any, *, has_replay: bool) -> Any:
    """Create a network of another kind, with a head of the same class.

    Args:
        has_replay: the agent has a replay, which can store sequences for a recurrent network.

    Raises:
        UsageError: the algorithm does not support this kind of network.
    """
    head = present.head if isinstance(present, BuiltInNetwork) else None
    kinds: Mapping[str, type[BuiltInNetwork]] = {} if head is None else FEEDFORWARD
    if isinstance(head, PolicyAndValue | PolicyOnly) or (has_replay and isinstance(head, QValues) and head.outputs is None):
        kinds = NETWORKS
    if head is None or kind not in kinds:
        known = f"{{{','.join(kinds)}}}" if kinds else "no built-in network"
        raise UsageError(f"--network {kind}: {algorithm} takes {known}")
    # Agents set the number of outputs themselves.
    if has_replay and isinstance(head, PolicyAndValue):
        return kinds[kind](head=head)  # The agent accepts no other.
    new_head: Any = type(head)(std=head.std) if isinstance(head, PolicyAndValue | PolicyOnly) else type(head)()
    return kinds[kind](head=new_head)
