"""Heads: settings of the last layers of the built-in networks, and of their outputs."""

from typing import Literal, TypeAlias

from polyak.core.struct import check_settings, choice, integer, number, static, struct
from polyak.networks.layers import ACTIVATIONS, Activation, set_widths

Std: TypeAlias = Literal["free", "state", "fixed", "sde"]


@struct(kw_only=True)
class PolicySettings:
    """The settings of an action's distribution.

    Attributes:
        log_std: the logarithm of the standard deviation of Box actions; its initial value if it is learned. With `"sde"`, the
            initial logarithm of each number of σ.
        std: the standard deviation: `"free"`, a parameter, the same in every state; `"state"`, an output of the policy's last
            layer, which starts at e^log_std; `"fixed"`, e^log_std; `"sde"`, for state-dependent exploration, √(z(s)² · σ²) of
            one Box action, z(s) the features of the last dense layer and σ a matrix of parameters.
        squash_mean: the mean of Box actions is middle + half_range · tanh(x), inside the bounds of the action.
    """

    log_std: float = number(default=0.0, static=True)
    std: Std = choice(default="free", choices=("free", "state", "fixed", "sde"))
    squash_mean: bool = choice(default=False, choices=(True, False))


@struct(kw_only=True)
class PolicyAndValue(PolicySettings):
    """The head of actor-critics: the parameters of the action's distribution, and the value of the state.

    With `"sde"` the features get no gradient of the standard deviation.

    Attributes:
        shared_torso: actor and critic share all layers but the last; None shares them in a `NatureCNN` alone.
        value_hidden: widths of the critic's dense layers; None takes the actor's widths.
        value_activation: activation between the critic's layers; None takes the actor's activation.

    Raises:
        TypeError, ValueError: a setting is out of its range; the message names it.
        ValueError: when a network is built, for `value_hidden` or `value_activation` with a shared torso or a recurrent
            network, and for `"sde"` with a recurrent one.
        ValueError: when an agent is built, for means to be squashed without a Box or into bounds that are not finite, and for
            `"sde"` with an action that is no Box.

    Source: Raffin et al. 2020, arXiv:2005.05719 (state-dependent exploration).
    """

    shared_torso: bool | None = choice(default=None, choices=(None, True, False))
    value_hidden: tuple[int, ...] | None = static(default=None)
    value_activation: Activation | None = choice(default=None, choices=(None, *ACTIVATIONS))

    def __post_init__(self) -> None:
        check_settings(self)
        if self.value_hidden is not None:
            set_widths(self, "value_hidden")


@struct(kw_only=True)
class PolicyOnly(PolicySettings):
    """The head of the actor of an `ActorAndCritic`: `(action_params, None)`.

    With `"sde"` the features get no gradient of the standard deviation.

    Raises:
        TypeError, ValueError: a setting is out of its range; see `PolicyAndValue`.
    """

    def __post_init__(self) -> None:
        check_settings(self)


@struct
class ValueOnly:
    """The head of the critic of an `ActorAndCritic`: `(None, value)`."""


@struct(kw_only=True)
class ActionValueSettings:
    """The settings of all heads of action values.

    Attributes:
        dueling: two heads, for the value V and the advantages A: Q(s, a) = V + A_a - mean_a A_a.
        noisy: dense layers and heads have noise in their weights; without a key they apply the means.
    """

    dueling: bool = choice(default=False, choices=(True, False))
    noisy: bool = choice(default=False, choices=(True, False))

    def __post_init__(self) -> None:
        check_settings(self)


@struct(kw_only=True)
class QValues(ActionValueSettings):
    """The head of action values: `(q, value)`, q `[B, n]` and the value of the greedy action, max_a q, `[B]`.

    So the greedy action of a `NetworkPolicy` is the best action, and `Boltzmann(policy, temperature)` draws by
    P(a) ∝ exp(q_a / temperature). With `outputs=K` the output is `[B, n, K]`, logits or quantiles for each action.

    Attributes:
        outputs: K, numbers for each action; None returns the action's value. `C51` and `QRDQN` set it.

    Raises:
        TypeError, ValueError: a setting is out of its range; the message names it.
        ValueError: when a network is built, for noise or `outputs` of a recurrent one.
        ValueError: when an agent is built, for actions that are not Discrete.

    Source: Wang et al. 2016, arXiv:1511.06581, eq. 9 (dueling); Fortunato et al. 2018, arXiv:1706.10295 (noise).
    """

    outputs: int | None = integer(default=None, optional=True)


@struct(kw_only=True)
class Quantiles(ActionValueSettings):
    """The head of implicit quantile networks, the quantile of each action's return at any fraction τ.

        Z(s, a, τ) = f(ψ(s) ∘ φ(τ))_a,    φ(τ) = relu(W cos(π i τ) + b),  i = 0 ... num_cosines - 1

    ψ is the convolutions (none for a vector) and all dense layers but the last, f the last dense layer and this head.

    Attributes:
        num_cosines: number of cosines in the embedding of a fraction.
        num_tau: number of fractions averaged when a policy chooses an action, the midpoints of equal parts of [0, 1].

    Raises:
        TypeError, ValueError: a setting is out of its range; the message names it.
        ValueError: when a network is built, for a recurrent one, or one without dense layers.

    Source: Dabney et al. 2018, arXiv:1806.06923, eq. 4.
    """

    num_cosines: int = integer(default=64)
    num_tau: int = integer(default=32)


ActorCriticHead: TypeAlias = PolicyAndValue | PolicyOnly | ValueOnly
Head: TypeAlias = ActorCriticHead | QValues | Quantiles
