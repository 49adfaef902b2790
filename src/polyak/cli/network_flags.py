"""Flags of the built-in networks."""

import dataclasses
from typing import Annotated, Any, Literal, TypeAlias

import tyro

from polyak.cli.agent_flags import setting_names
from polyak.cli.agent_source import takes_sequences
from polyak.cli.flags import UsageError, default_hint, hide

Activation: TypeAlias = Literal["tanh", "relu", "elu", "gelu", "silu"]
Norm: TypeAlias = Literal["layer", "batch", "batch_renorm"]
Residual: TypeAlias = Literal["pre_norm", "post_norm", "hypersphere", "inverted"]

NETWORK_DEFAULT = "the preset's, else chosen from the spaces"


@tyro.conf.configure(tyro.conf.DisallowNone)
@dataclasses.dataclass(frozen=True)
class NetworkFlags:
    """The built-in network."""

    network: Annotated[Literal["mlp", "cnn", "lstm", "gru"] | None, default_hint(NETWORK_DEFAULT, "{mlp,cnn,lstm,gru}")] = None
    (
        "dense layers, convolutions of images with dense layers, or a recurrent network, for which agents with a replay learn "
        "from sequences; with an actor and critics lstm or gru, a cell before the layers of each"
    )
    hidden: Annotated[tuple[int, ...] | None, default_hint(NETWORK_DEFAULT, "INT [INT ...]")] = None
    """widths of the dense layers"""
    activation: Annotated[Activation | None, default_hint(NETWORK_DEFAULT, "{tanh,relu,elu,gelu,silu}")] = None
    """activation function between the layers"""
    shared_torso: Annotated[bool | None, default_hint(NETWORK_DEFAULT)] = None
    """share all layers but the last between actor and critic"""
    log_std: Annotated[float | None, default_hint(NETWORK_DEFAULT, "FLOAT")] = None
    """initial logarithm of the standard deviation of Box actions; for TD3 only with --sde-sample-freq"""
    squash_mean: Annotated[bool | None, default_hint(NETWORK_DEFAULT)] = None
    """squash the mean of Box actions into their bounds with tanh"""
    value_hidden: Annotated[tuple[int, ...] | None, default_hint(NETWORK_DEFAULT, "INT [INT ...]")] = None
    """widths of the critic's dense layers, if they differ from the actor's"""
    value_activation: Annotated[Activation | None, default_hint(NETWORK_DEFAULT, "{tanh,relu,elu,gelu,silu}")] = None
    """activation function of the critic, if it differs from the actor's"""
    num_critics: Annotated[int | None, default_hint("the preset's, else the algorithm's", "INT")] = None
    """number of critics in the ensemble"""
    norm: Annotated[Norm | None, default_hint("the preset's, else the agent's", "{layer,batch,batch_renorm}")] = None
    """normalize the dense layers; beside an actor the critics' layers alone; batch and batch_renorm need critics"""
    residual: Annotated[
        Residual | None, default_hint("the preset's, else the agent's", "{pre_norm,post_norm,hypersphere,inverted}")
    ] = None
    """residual blocks of actor and critics, one for each width, which are equal; hypersphere needs --weight-norm"""
    dueling: Annotated[bool | None, default_hint("the preset's, else False")] = None
    """divide Q-networks into two heads, for the value and the advantages"""
    noisy: Annotated[bool | None, default_hint("the preset's, else False")] = None
    """use noisy Q-networks, whose weights have learned noise that is drawn at every step, to explore with --epsilon 0"""
    dropout: Annotated[float | None, default_hint("the preset's, else 0", "FLOAT")] = None
    """dropout probability of the critics' units during training"""

    def changes(self) -> dict[str, Any]:
        """Return the flags that were set, by field.

        Raises:
            UsageError: a list of widths is empty.
        """
        changes = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}
        for name, value in changes.items():
            if value == ():
                raise UsageError(f"--{name.replace('_', '-')} must have at least one width, got none")
        return changes


# The flags of each kind of network.
OF_ACTOR_CRITICS = {
    "network", "hidden", "activation", "norm", "shared_torso", "log_std", "squash_mean", "value_hidden", "value_activation",
}  # fmt: skip
OF_Q_NETWORKS = {"network", "hidden", "activation", "norm", "dueling", "noisy"}
OF_ACTOR_AND_CRITICS = {
    "hidden", "activation", "log_std", "value_hidden", "value_activation", "num_critics", "norm", "dropout",
    "residual",
}  # fmt: skip
OF_POLICIES = {"network", "hidden", "activation", "norm", "log_std", "squash_mean"}
REJECTED = {
    "theta": {"log_std", "squash_mean"},
    "normalize_q": {"log_std"},
    "max_exploration_noise": {"log_std"},
    "q_lambda": {"noisy"},
}
"""Flags that some agents reject, by a setting that only these agents have."""
ACCEPTED = {"expectile": "squash_mean"}
"""Flags that some agents with critics take, by a setting that only these agents have."""


def network_flags_in_help(agent: str) -> type[NetworkFlags]:
    """Return `NetworkFlags` without the flags that an agent, a `"module:Class"`, rejects."""
    settings = setting_names(agent)
    of_policies = OF_POLICIES if "replay" in settings else OF_ACTOR_CRITICS
    of_values = OF_Q_NETWORKS if "epsilon" in settings else of_policies
    of_critics = OF_ACTOR_AND_CRITICS | ({"network"} if takes_sequences(agent) else set())
    used = of_critics if "critics" in settings else of_values
    used = used | {flag for setting, flag in ACCEPTED.items() if setting in settings}
    rejected = {flag for setting, flags in REJECTED.items() if setting in settings for flag in flags}
    return hide(NetworkFlags, {field.name for field in dataclasses.fields(NetworkFlags)} - (used - rejected))
