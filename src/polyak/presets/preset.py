"""Presets: settings to train one algorithm in one environment. Plain data, so that listing presets does not import JAX."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polyak.core.printing import short_repr

SDE_LOG_STD = {"actor": -3.0, "network": 0.0}
"""Initial logarithm of σ, as in the agents' default networks, where a preset has none."""

LEARNED_ALPHA_SETTINGS = ("initial_alpha", "target_entropy", "alpha_learning_rate", "alpha_loss")
"""Settings of a stochastic actor without effect with a fixed `alpha`, as in `polyak.agents.soft_actor`, which imports JAX."""

OPTIMIZER_SETTINGS = (
    "learning_rate", "actor_learning_rate", "alpha_learning_rate", "adam_b1", "adam_eps", "max_grad_norm",
    "optimizer_name", "rms_decay", "rms_eps", "weight_decay",
)  # fmt: skip
"""Settings without effect with an `optimizer`, as in `polyak.ops.gradient_step`, which imports JAX; and BRO's weight decay."""


@short_repr()
@dataclass(frozen=True, repr=False)
class LinearOverTraining:
    """A `Linear` schedule from `start` to `end` over a training run of any length, or over its first `fraction`."""

    start: float
    end: float = 0.0
    fraction: float = 1.0


LINEAR = "linear:START[:END[:FRACTION]]"
"""Syntax of a schedule: from START to END (default 0) over the first FRACTION (default 1) of the training."""


def parse_schedule(text: str) -> float | LinearOverTraining:
    """The number or the `LINEAR` schedule in a text.

    >>> parse_schedule("linear:0.001")
    LinearOverTraining(start=0.001)

    Raises:
        ValueError: the text is neither.
    """
    name, *numbers = text.split(":")
    values = []
    with contextlib.suppress(ValueError):
        values = [float(number) for number in numbers or [name]]
    is_schedule = not numbers or (name == "linear" and len(values) <= 3 and all(map(math.isfinite, values)))
    if not values or not is_schedule:
        raise ValueError(f"must be a number or {LINEAR}, such as linear:0.001; got {text!r}")
    if not numbers:
        return values[0]
    schedule = LinearOverTraining(*values)
    if not 0 < schedule.fraction <= 1:
        raise ValueError(f"FRACTION of {LINEAR} must be above 0 and at most 1, got {text!r}")
    return schedule


@short_repr()
@dataclass(frozen=True, repr=False)
class Preset:
    """Settings to train one algorithm in one environment.

    Attributes:
        env_steps: length of the training run, in environment steps.
        num_envs: number of copies of the environment.
        values: the agent's fields; `actor` and `critics` hold fields of these networks, `network` the fields of an `MLP` and of
            its head, and `replay` the arguments of `make_replay`.
        source: source of the numbers.
        loop: the loop that the algorithm is made for; `"auto"` goes by the environment.
        workers: number of worker processes of that loop.
    """

    env_steps: int
    num_envs: int
    values: Mapping[str, Any]
    source: str
    loop: Literal["auto", "asynchronous"] = "auto"
    workers: int | None = None

    def settings(self, env_steps: int, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The agent's fields for a training run of `env_steps`.

        Args:
            changes: fields that replace the preset's. Fields of the preset that would have no effect are left out: with a fixed
                `alpha` the settings of a learned α, and vice versa; with a `temperature` the `epsilon`; with an `optimizer` the
                settings of Adam and RMSProp; with a `theta`, which only Ornstein-Uhlenbeck noise has, the `exploration`; with
                `parameter_noise` the noise on actions; with `sde_sample_freq` the noise that is held; with rewards that are not
                divided by the deviation of returns the `max_return`; with a network that replaces a noisy one the `epsilon` of
                0; and with a `learning_rate` the schedules of the rates of actor and α, which go with the preset's. The actor's
                noise follows `sde_sample_freq`, and its layers are normalized with `parameter_noise`.

        >>> Preset(1000, 8, {"gamma": 0.9, "learning_rate": LinearOverTraining(0.1)}, "").settings(500)
        {'gamma': 0.9, 'learning_rate': Linear(start=0.1, end=0.0, env_steps=500.0)}
        """
        changed = dict(changes or {})
        unused = _without_effect(changed)
        if "learning_rate" in changed:
            rates = "actor_learning_rate", "alpha_learning_rate"
            unused += tuple(name for name in rates if isinstance(self.values.get(name), LinearOverTraining))
        if "network" in changed and self.values.get("network", {}).get("noisy"):
            from polyak.networks.q_network import is_noisy

            # The preset explores only by the noise of its network.
            unused += () if is_noisy(changed["network"]) else ("epsilon",)
        values = {name: value for name, value in self.values.items() if name not in unused} | changed
        settings = {name: with_length(value, env_steps) for name, value in values.items()}
        if "replay" in self.values.keys() - changed.keys():
            settings["replay"] = make_replay(settings["replay"], env_steps)
        if networks := (self.values.keys() - changed.keys()) & {"network", "actor", "critics"}:
            has_sde = settings.get("sde_sample_freq") is not None
            actor = {"norm": "layer"} if settings.get("parameter_noise") is not None else {}
            fields = {name: (actor if name == "actor" else {}) | dict(settings[name]) for name in networks}
            settings |= {name: build_network(name, _with_noise(name, fields[name], has_sde=has_sde)) for name in networks}
        return settings


def make_replay(arguments: Mapping[str, Any], env_steps: int) -> Any:
    """The replay of a `kind` (default `"uniform"`) with the other arguments; schedules get the length of the training run.

    >>> make_replay({"kind": "prioritized", "capacity": 5_000, "alpha": 0.5}, 10_000)
    PrioritizedReplay(capacity=5000, alpha=0.5)
    >>> make_replay({"kind": "hindsight", "strategy": "final", "replay": {"kind": "prioritized", "capacity": 5_000}}, 10_000)
    HindsightReplay(replay=PrioritizedReplay(capacity=5000), strategy='final')
    """
    from polyak.replay import HindsightReplay, PrioritizedReplay, SequenceReplay, UniformReplay

    kinds: Any = {"uniform": UniformReplay, "prioritized": PrioritizedReplay}
    kinds |= {"sequence": SequenceReplay, "hindsight": HindsightReplay}
    make = kinds[arguments.get("kind", "uniform")]
    fields = {name: with_length(value, env_steps) for name, value in arguments.items() if name != "kind"}
    if isinstance(inner := fields.get("replay"), Mapping):
        fields["replay"] = make_replay(inner, env_steps)
    return make(**fields)


def build_network(name: str, fields: Mapping[str, Any]) -> Any:
    """The network of a setting: `Actor`, `Critics` or, for `network`, an `MLP`, whose other fields are its head's.

    >>> build_network("network", {"hidden": (512,), "dueling": True})
    MLP(hidden=(512,), head=QValues(dueling=True))
    """
    from polyak.networks.actor import Actor
    from polyak.networks.critics import Critics
    from polyak.networks.feedforward import MLP
    from polyak.networks.heads import PolicyAndValue, QValues

    if name != "network":
        return (Actor if name == "actor" else Critics)(**fields)
    of_head = {key: value for key, value in fields.items() if key not in MLP.__dataclass_fields__}
    head = QValues if of_head.keys() <= QValues.__dataclass_fields__.keys() else PolicyAndValue
    of_mlp = {key: value for key, value in fields.items() if key not in of_head}
    return MLP(**of_mlp, head=head(**of_head) if of_head else None)


def _without_effect(changes: Mapping[str, Any]) -> tuple[str, ...]:
    """The preset's settings that have no effect with these changes, such as the settings of a learned α with a fixed α."""
    unused: tuple[str, ...] = ()
    if changes.get("alpha") is not None:
        unused += LEARNED_ALPHA_SETTINGS
    elif any(changes.get(name) is not None for name in LEARNED_ALPHA_SETTINGS):
        unused += ("alpha",)
    if changes.get("temperature") is not None:
        unused += ("epsilon",)
    if changes.get("optimizer") is not None:
        unused += OPTIMIZER_SETTINGS
    if changes.get("theta") is not None:
        unused += ("exploration",)
    if changes.get("parameter_noise") is not None:
        unused += ("exploration", "exploration_noise", "theta")
    if changes.get("sde_sample_freq") is not None:
        unused += ("max_noise_repeats",)
    if changes.get("normalize_reward", "return") != "return":
        unused += ("max_return",)
    return unused


def _with_noise(name: str, arguments: Mapping[str, Any], *, has_sde: bool) -> Mapping[str, Any]:
    """The arguments of a network; state-dependent exploration needs an actor with `std="sde"`, and nothing else takes one."""
    if has_sde == (arguments.get("std") == "sde") or name == "critics":
        return arguments
    if not has_sde:
        return {key: value for key, value in arguments.items() if key not in ("std", "log_std")}
    if arguments.get("squash_log_std"):  # its log_std is before the squashing
        arguments = {key: value for key, value in arguments.items() if key not in ("squash_log_std", "log_std")}
    return {"log_std": SDE_LOG_STD[name], **arguments, "std": "sde"}


def with_length(value: Any, env_steps: int) -> Any:
    """The value of a setting, a schedule with the length of the training."""
    if not isinstance(value, LinearOverTraining):
        return value
    from polyak.ops.schedules import Linear

    return Linear(value.start, value.end, env_steps * value.fraction)
