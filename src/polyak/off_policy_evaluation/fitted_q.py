"""Fitted Q evaluation: the action values of a policy, learned from recorded steps by one compiled program."""

import dataclasses
import math
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int32, PRNGKeyArray

from polyak.copies.follow import Follow
from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import Box, Discrete, EnvSpec, MultiDiscrete, in_action, leaf_spaces
from polyak.core.struct import MAX_INT32, check_settings, integer, number, setting, static, struct
from polyak.core.types import PyTree, Variables
from polyak.core.warn import warn
from polyak.loops.compiled_loop import CHUNK_SECONDS, iterations_for
from polyak.networks.action_units import to_unit
from polyak.networks.critics import Critics
from polyak.off_policy_evaluation.estimate import Floats
from polyak.off_policy_evaluation.policy_steps import Choices, PolicySteps
from polyak.ops.distributions.combinations import MAX_COMBINATIONS, as_discrete, ravel_action
from polyak.ops.gradient_step import Aux, on_vector
from polyak.ops.normalize import ObsNormalizer

OWNER = "evaluate_offline"
LEAST_GRADIENT_STEPS = 10_000
"""Smallest default of gradient steps."""


def _check_critics(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, Critics):
        raise TypeError(f"{owner}: {name} must be Critics(...), got {value!r:.80}")
    if value.num_quantiles is not None:
        raise ValueError(f"{owner}: num_quantiles of {name} must be None, got {value.num_quantiles}")
    if value.num_critics != Critics().num_critics:
        raise ValueError(f"{owner}: num_critics of {name} must be left out, as each resample has one, got {value.num_critics}")


@struct(kw_only=True)
class FQE:
    """Settings of fitted Q evaluation.

        L(θ) = E[ (r + γ (1 - terminated) E_{a'~π(s')} Q_target(s', a') - Q_θ(s, a))² ]

    over the recorded steps, with a learning rate that falls to 0. The expectation over Discrete and MultiDiscrete actions is
    exact; over Box actions it is the mean of samples.

    An error of Q that is the same everywhere shrinks by the factor 1 - τ (1 - γ) with each gradient step, so a γ close to 1
    needs more of them, or a larger τ. The critics of all resamples begin at one level, so the interval leaves out what remains
    of this error.

    Attributes:
        critics: the networks of Q, with the default of `num_critics`; each resample has one.
        gradient_steps: number of gradient steps, at least 4 / (τ (1 - γ)); None takes 5 / (τ (1 - γ)), and at least 10,000.
            With γ = 1, the length of the longest episode stands for 1 / (1 - γ).
        batch_size: recorded steps in a gradient step.
        learning_rate: Adam's at the beginning.
        tau: τ, the share of the critics that their target copies take over after each gradient step.
        num_action_samples: samples of the policy's Box action in each observation; a deterministic policy needs one.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    Source: Le, Voloshin and Yue 2019, arXiv:1903.08738, algorithm 3; the bootstrap, Hao et al. 2021, arXiv:2102.03607.
    """

    critics: Critics = setting(default=Critics((64, 64)), check=_check_critics, static=True)
    gradient_steps: int | None = integer(default=None, optional=True)
    batch_size: int = integer(default=256)
    learning_rate: float = number(default=1e-3, above=0)
    tau: float = number(default=0.05, above=0, at_most=1)
    num_action_samples: int = integer(default=10)

    def __post_init__(self) -> None:
        check_settings(self)

    def for_data(self, steps: PolicySteps, gamma: float, least_episodes: int) -> "FQE":
        """The settings with a number of gradient steps, after a check that FQE can evaluate the policy on the data.

        Raises:
            ValueError: actions are neither Discrete, MultiDiscrete nor of Boxes; γ is 1 and episodes were cut short, so that
                values have no bound; or there are too few episodes or gradient steps.
        """
        _check_actions(steps.spec)
        if gamma == 1 and (cut := int(steps.data.truncated.sum())):
            raise ValueError(f"{OWNER}: gamma must be below 1 for FQE, as {cut} episodes were cut short, got 1")
        if steps.data.num_episodes < least_episodes:
            raise ValueError(f"{OWNER}: cross-fitting needs {least_episodes} episodes, got {steps.data.num_episodes}")
        horizon = 1 / (1 - gamma) if gamma < 1 else float(steps.data.lengths.max())
        least = round(4 * horizon / self.tau)
        default = max(5 * least // 4, LEAST_GRADIENT_STEPS)
        count = default if self.gradient_steps is None else self.gradient_steps
        if not least <= count <= MAX_INT32:
            raise ValueError(
                f"FQE: gradient_steps={count} must be in [{least}, {MAX_INT32}] with gamma={gamma:g} and tau={self.tau:g}: at "
                "least 4 / (tau * (1 - gamma)), or values do not reach their level"
            )
        return dataclasses.replace(self, gradient_steps=count)


@struct
class FittedQ:
    """The action values that FQE has learned; `q(obs, action)` in the units of the policy.

    Attributes:
        variables: the arrays of the critics: one of all data, and one of each resample.
        normalizer: normalizes observations by the mean and standard deviation of the data.
        center, scale: Q = center + scale · the network's output.
        critics: the networks.
        spec: the policy's spec.
        gamma: the discount per step.
    """

    variables: Variables
    normalizer: ObsNormalizer
    center: Float[Any, ""]
    scale: Float[Any, ""]
    critics: Critics = static()
    spec: EnvSpec = static()
    gamma: float = static()

    def __call__(self, obs: PyTree, action: PyTree) -> Float[Array, " B"]:
        """Q(s, a) `[B]`."""
        return self.all_critics(obs, action)[:, 0]

    def all_critics(self, obs: PyTree, action: PyTree) -> Float[Array, "B critics"]:
        """Q(s, a) of each critic `[B, critics]`."""
        action = _critic_action(self.spec, action)
        (q, _), _, _ = self.critics.apply(self.variables, (self.normalizer.normalize(obs), action))
        return self.center + self.scale * _select_action(q, action)


@struct
class _Batches:
    """The recorded steps on the device.

    Attributes:
        obs: leaves `[N + E, ...]`.
        choices: the policy's actions in each row, in the units of the critics; None where they return the values of all.
        action: `[N, ...]`, in the units of the critics.
        reward: r, in units of the network's output `[N]`.
        discount: γ, 0 after a terminal state `[N]`.
        row: the row of each step `[N]`.
        weight: how often each critic's resample has the step `[N, critics]`.
    """

    obs: PyTree
    choices: Choices
    action: PyTree
    reward: Float32[Array, " N"]
    discount: Float32[Array, " N"]
    row: Int32[Array, " N"]
    weight: Float32[Array, "N critics"]


def fit(fqe: FQE, steps: PolicySteps, choices: Choices, counts: Floats, gamma: float, key: PRNGKeyArray) -> FittedQ:
    """Learn the action values of the policy whose actions are `choices`.

    Args:
        fqe: the settings that `FQE.for_data` has checked.
        counts: how often each critic's resample has each episode `[critics, E]`.

    Raises:
        FloatingPointError: a gradient step would have made the weights NaN or infinite.
    """
    discount = np.where(steps.terminated, 0.0, gamma)
    # The constant that satisfies Bellman's equation on average: networks have least to learn around it.
    center = float(steps.data.reward.mean(dtype=np.float64) / (1 - discount).mean())
    scale = float(_returns_to_go(steps, discount, center).std())
    scale = scale if scale > 1e-6 * max(1.0, abs(center)) else max(1.0, abs(center))
    spec, critics = _critic_spec(steps.spec), dataclasses.replace(fqe.critics, num_critics=len(counts))
    obs = jax.tree.map(jnp.asarray, steps.time_steps.obs)
    normalizer = ObsNormalizer.init(spec.obs).update(obs, np.ones(len(steps.time_steps.first), bool))
    is_finite = isinstance(spec.action, Discrete)
    batches = _Batches(
        obs=normalizer.normalize(obs),
        choices=Choices(
            None if is_finite else jax.tree.map(jnp.asarray, to_unit(spec, choices.action)), jnp.asarray(choices.probability)
        ),
        action=jax.tree.map(jnp.asarray, _critic_action(steps.spec, steps.action)),
        # The bootstrapped value is discount · (center + scale · output).
        reward=jnp.asarray((steps.data.reward + (discount - 1) * center) / scale, jnp.float32),
        discount=jnp.asarray(discount, jnp.float32),
        row=jnp.asarray(steps.row, jnp.int32),
        weight=jnp.asarray(counts[:, steps.episode].T, jnp.float32),
    )
    init_key, step_key = jax.random.split(key)
    copies = NetworkCopies.create(critics, init_key, spec, optimizer=None, target=Follow(fqe.tau), name="FQE")
    copies = _learn(fqe, copies.with_optimizer_state(_optimizer(fqe)), batches, step_key)
    if skipped := int(copies.guard.skipped):
        raise FloatingPointError(
            f"FQE: {skipped} gradient steps were NaN or infinite; lower learning_rate={fqe.learning_rate:g}"
        )
    return FittedQ(copies.variables("target"), normalizer, jnp.float32(center), jnp.float32(scale), critics, steps.spec, gamma)


def warn_of_impossible_values(values: Floats, steps: PolicySteps, gamma: float) -> None:
    """Warn of values that no policy can have with the rewards of the data."""
    if gamma == 1.0:
        return
    low, high = (float(bound) / (1 - gamma) for bound in (min(0.0, steps.data.reward.min()), max(0.0, steps.data.reward.max())))
    slack = 0.1 * (high - low) + 1e-3 * max(1.0, abs(low), abs(high))
    if values.min() < low - slack or values.max() > high + slack:
        warn(
            f"{OWNER}: the values of FQE reach from {values.min():.3g} to {values.max():.3g}, but the rewards allow "
            f"only {low:.3g} to {high:.3g}: Q is wrong for actions of the policy that the data lack"
        )


def _check_actions(spec: EnvSpec) -> None:
    leaves = list(leaf_spaces(spec.action))
    is_finite = isinstance(spec.action, Discrete | MultiDiscrete)
    other = [f"{leaf}{in_action(path)}" for path, leaf in leaves if not is_finite and not isinstance(leaf, Box)]
    if isinstance(spec.action, MultiDiscrete) and math.prod(spec.action.nvec) > MAX_COMBINATIONS:
        other = [f"{math.prod(spec.action.nvec)} combinations of {spec.action}"]
    if other:
        raise ValueError(
            f"{OWNER}: FQE needs actions that are Discrete, MultiDiscrete with at most {MAX_COMBINATIONS} combinations, or of "
            f"Boxes, got {other[0]}; use method='is' or 'wis', or pass q"
        )


def _critic_spec(spec: EnvSpec) -> EnvSpec:
    """The spec as the critics see it: MultiDiscrete actions as one choice."""
    return as_discrete(OWNER, spec) if isinstance(spec.action, MultiDiscrete) else spec


def _critic_action(spec: EnvSpec, action: PyTree) -> Any:
    """Actions of the policy in the units of the critics: a combination's number, a bounded Box in [-1, 1]."""
    return ravel_action(spec.action.nvec, action) if isinstance(spec.action, MultiDiscrete) else to_unit(spec, action)


def _learn(fqe: FQE, copies: NetworkCopies, batches: _Batches, key: PRNGKeyArray) -> NetworkCopies:
    """All gradient steps, in chunks of half a second, so that Ctrl-C is heard; chunks do not change the numbers.

    They end with the chunk in which a step was NaN or infinite.
    """
    done, most, total = 0, 1, fqe.gradient_steps
    assert total is not None, "FQE.for_data has set it"
    while done < total:
        count, before = min(most, total - done), time.perf_counter()
        copies = jax.block_until_ready(_program(fqe, copies, batches, key, jnp.uint32(done), jnp.uint32(count)))
        if int(copies.guard.skipped):
            break
        done += count
        most = iterations_for(CHUNK_SECONDS, (time.perf_counter() - before) / count)
    return copies


def _steps(fqe: FQE, copies: NetworkCopies, batches: _Batches, key: PRNGKeyArray, start: Array, count: Array) -> NetworkCopies:
    def step(i: Array, copies: NetworkCopies) -> NetworkCopies:
        draw_key, loss_key = jax.random.split(jax.random.fold_in(key, i))
        index = jax.random.randint(draw_key, (fqe.batch_size,), 0, len(batches.row))
        loss = partial(_loss, copies=copies, batches=batches, key=loss_key)
        new, _ = copies.train(loss, _optimizer(fqe), index)
        return new.follow(updates=jnp.uint32(1))

    return jax.lax.fori_loop(start, start + count, step, copies)


_program = jax.jit(_steps, donate_argnums=1)


def _loss(
    params: PyTree, index: Int32[Array, " B"], *, copies: NetworkCopies, batches: _Batches, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Aux]:
    """L(θ) of a batch, summed over the critics."""
    row, critics = batches.row[index], copies.network
    obs, action = jax.tree.map(lambda x: x[row], batches.obs), jax.tree.map(lambda x: x[index], batches.action)
    next_obs, choices = jax.tree.map(lambda x: x[row + 1], (batches.obs, batches.choices))
    next_value = _expected_value(critics, copies.variables("target"), next_obs, choices)
    td_target = jax.lax.stop_gradient(batches.reward[index, None] + batches.discount[index, None] * next_value)
    variables = dataclasses.replace(copies.online, params=params)
    (q, _), _, stats = critics.apply(variables, (obs, action), train=True, key=key)
    error = jnp.square(td_target - _select_action(q, action))
    return jnp.sum(jnp.mean(batches.weight[index] * error, axis=0)), Aux({}, stats)


def _expected_value(critics: Any, variables: Variables, obs: PyTree, choices: Choices) -> Float[Array, "B critics"]:
    """E_{a~π(s)} of the critics' outputs; `choices.action` is None where they return the outputs of all actions."""
    probability = choices.probability
    if choices.action is None:
        (q, _), _, _ = critics.apply(variables, (obs, None))
        return jnp.sum(probability[:, None, :] * q, axis=-1)
    count = probability.shape[1]
    rows = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), obs)
    actions = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), choices.action)
    (q, _), _, _ = critics.apply(variables, (rows, actions))
    return jnp.sum(probability[:, :, None] * q.reshape(-1, count, q.shape[-1]), axis=1)


def _select_action(q: Float[Array, "B critics *n"], action: Any) -> Float[Array, "B critics"]:
    """The critics' output of an action, where they return the outputs of all n."""
    return q if q.ndim == 2 else jnp.take_along_axis(q, action.astype(jnp.int32)[:, None, None], axis=2)[:, :, 0]


def _optimizer(fqe: FQE) -> optax.GradientTransformation:
    return on_vector(optax.adam(optax.cosine_decay_schedule(fqe.learning_rate, fqe.gradient_steps)))


def _returns_to_go(steps: PolicySteps, discount: Floats, final_value: float) -> Floats:
    """The discounted return of the data from each step on, with `final_value` where an episode was cut short."""
    returns, return_ = np.zeros(len(steps.row)), 0.0
    is_last = np.append(np.diff(steps.episode) > 0, True)
    for i in range(len(returns) - 1, -1, -1):
        return_ = float(steps.data.reward[i]) + discount[i] * (final_value if is_last[i] else return_)
        returns[i] = return_
    return returns
