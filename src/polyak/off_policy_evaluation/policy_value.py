"""`evaluate_offline`: estimates the value of a policy from a data set."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Policy, PyTree
from polyak.data.data_set import DataSet
from polyak.off_policy_evaluation.estimate import Estimate, Estimator, Floats, draw_counts, student_interval
from polyak.off_policy_evaluation.fitted_q import FQE, FittedQ, fit, warn_of_impossible_values
from polyak.off_policy_evaluation.importance import (
    ImportanceRatios,
    doubly_robust,
    effective_sample_size,
    importance_sampling,
    warn_of_poor_overlap,
    weighted_importance_sampling,
)
from polyak.off_policy_evaluation.policy_steps import (
    CHUNK,
    Choices,
    PolicySteps,
    compute_choices,
    compute_log_probs,
    read_steps,
    take_rows,
)

OWNER = "evaluate_offline"
METHODS = ("fqe", "is", "wis", "dr", "dm")
OPTIONS = {"behavior": ("is", "wis", "dr"), "q": ("dm", "dr"), "per_decision": ("is", "wis"), "fqe": ("fqe", "dr")}
"""The methods that an argument is for."""

FOLDS = 5
"""Number of parts of the data for cross-fitting."""

ActionValues = Callable[[PyTree, PyTree], Any]


@suggest_arguments("evaluate_offline")
def evaluate_offline(
    policy: Policy,
    data: DataSet,
    *,
    method: Literal["fqe", "is", "wis", "dr", "dm"] = "fqe",
    gamma: float = 0.99,
    behavior: Policy | None = None,
    q: ActionValues | None = None,
    per_decision: bool | None = None,
    fqe: FQE | None = None,
    confidence: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
) -> Estimate:
    """Estimate the value of a policy, its expected discounted return from the beginning of an episode, without an environment.

    - `"fqe"`: fitted Q evaluation learns Q of the policy; the value is the mean of V(s₀) = E_{a~π(s₀)} Q(s₀, a). It needs no
      probabilities of the behavior.
    - `"is"`: importance sampling weights the returns of episodes by Π_t π(a_t|s_t) / μ(a_t|s_t), μ the behavior. Unbiased.
    - `"wis"`: weighted importance sampling divides by the sum of the weights; of small bias, and with a smaller variance.
    - `"dr"`: sequential doubly robust estimation corrects V(s₀) by weighted errors of Q, which FQE learns from other episodes
      (cross-fitting in five parts). Unbiased but for episodes that were cut short, if the behavior's probabilities are right.
    - `"dm"`: the direct method, the mean of V(s₀) of a Q that you have.

    An episode that was cut short is continued by V of its final observation in `"fqe"` and `"dr"`; `"is"` and `"wis"` estimate
    the return up to there. Episodes without their beginnings (`DataSet.has_beginning`) are left out.

    Args:
        policy: the policy to evaluate, such as `agent.policy(state)`; its memory, if any, follows the recorded episodes.
        data: episodes of the environment, from its initial states on.
        method: the estimator.
        gamma: discount per step, in [0, 1].
        behavior: the policy that has collected the data, or an estimate of it such as `collect_policy` of a trained `BC`; None
            takes `data.log_prob`. For `"is"`, `"wis"` and `"dr"`.
        q: action values of the policy, `q(obs, action) -> [B]` of JAX arrays in the units of the policy, learned from other
            data, such as the `q` of an `Estimate`; for `"dm"`, and for `"dr"` in place of FQE.
        per_decision: weight each reward by the ratios up to its step, which varies less; False weights whole returns. For
            `"is"` and `"wis"`, where None is True.
        fqe: settings of fitted Q evaluation, for `"fqe"` and `"dr"`; None takes `FQE()`.
        confidence: level of the interval, in (0, 0.999].
        resamples: number of resamples of the episodes, at least 5, from which the interval follows. For `"fqe"` each one trains
            a critic, and None is 10; the other methods resample their estimates of the episodes, and None is 2,000.
        seed: source of all randomness.

    Raises:
        TypeError, ValueError: an argument is invalid, or has no effect with this method; the data are of another environment;
            the policy has action masks; the behavior's probabilities are missing, or 0 for an action that was taken; all
            importance weights are 0; or the policy or the behavior has no probabilities, as deterministic ones with Box
            actions, for which only `"fqe"` and `"dm"` work.
        FloatingPointError: a gradient step was NaN or infinite.

    Source: Voloshin et al. 2019, arXiv:1911.06854, compare the estimators; Chernozhukov et al. 2018, arXiv:1608.00060,
    cross-fitting.
    """
    _check_arguments(method, gamma, confidence, resamples, seed)
    _check_options(method, {"behavior": behavior, "q": q, "per_decision": per_decision, "fqe": fqe})
    steps, gamma = read_steps(OWNER, policy, _complete_episodes(data)), float(gamma)
    if isinstance(q, FittedQ):
        _check_fitted_q(q, steps, gamma)
    settings = FQE() if fqe is None else fqe
    if q is None and method in OPTIONS["fqe"]:
        settings = settings.for_data(steps, gamma, least_episodes=FOLDS if method == "dr" else 1)
    result = partial(Estimate, confidence=confidence, method=method, gamma=gamma, episodes=steps.data.num_episodes)
    if method == "fqe":
        fitted_q, value, others = _fit_resamples(settings, steps, gamma, resamples or 10, seed)
        return result(value, *student_interval(value, others, confidence), q=fitted_q)
    if method == "dm":
        estimator = Estimator.mean(_state_values(q, steps, _choices(settings, steps, seed), _starts(steps))[:, 0])
    else:
        ratios = _compute_ratios(steps, behavior, method, gamma)
        result = partial(result, effective_sample_size=effective_sample_size(ratios.log_episode_weight))
        if method == "dr":
            estimator = _fit_doubly_robust(settings, steps, ratios, q, seed)
        else:
            sampling = importance_sampling if method == "is" else weighted_importance_sampling
            estimator = sampling(ratios, per_decision=per_decision is not False)
    return result(*estimator.bootstrap(resamples=resamples or 2_000, seed=seed, confidence=confidence))


def _check_arguments(method: str, gamma: Any, confidence: Any, resamples: Any, seed: Any) -> None:
    check_choice(OWNER, "method", method, METHODS)
    check_number(OWNER, "gamma", gamma, at_least=0, at_most=1)
    check_number(OWNER, "confidence", confidence, above=0, at_most=0.999)
    check_integer(OWNER, "resamples", resamples, at_least=5, optional=True)
    check_integer(OWNER, "seed", seed, at_least=0, at_most=2**32 - 1)


def _check_options(method: str, options: dict[str, Any]) -> None:
    """Check the arguments that some methods have, and that they have an effect."""
    for name, value in options.items():
        if value is not None and method not in OPTIONS[name]:
            methods = " and ".join(map(repr, OPTIONS[name]))
            raise ValueError(f"{OWNER}: {name} must be left out with method={method!r}; it is for {methods}")
    q, fqe = options["q"], options["fqe"]
    if fqe is not None and not isinstance(fqe, FQE):
        raise TypeError(f"{OWNER}: fqe must be FQE(...) or None, got {fqe!r:.80}")
    if fqe is not None and q is not None:
        raise ValueError(f"{OWNER}: fqe must be left out with q, which takes its place")
    if (q is not None or method == "dm") and not callable(q):
        raise TypeError(f"{OWNER}: q must be a function of (obs, action) with method={method!r}, got {q!r:.80}")
    check_choice(OWNER, "per_decision", options["per_decision"], (None, True, False))


def _check_fitted_q(q: FittedQ, steps: PolicySteps, gamma: float) -> None:
    """Check that Q has the discount and the units of the policy's actions."""
    if q.gamma != gamma:
        raise ValueError(f"{OWNER}: gamma must be {q.gamma:g}, with which q was learned, got {gamma:g}")
    learned, wanted = ((spec.action, spec.action_scaling) for spec in (q.spec, steps.spec))
    if learned != wanted:
        raise ValueError(f"{OWNER}: q must have the actions {wanted[0]} ({wanted[1]}), got {learned[0]} ({learned[1]})")


def _complete_episodes(data: Any) -> Any:
    """The data without the episodes that lack their beginnings, whose first observations are no initial ones."""
    if not isinstance(data, DataSet) or data.has_beginning is None:
        return data
    if not data.has_beginning.any():
        raise ValueError(f"{OWNER}: no episode of the data set {data.name!r} has its beginning; collect new episodes")
    return data.select(data.has_beginning)


def _compute_ratios(steps: PolicySteps, behavior: Policy | None, method: str, gamma: float) -> ImportanceRatios:
    """The ratios of the policy's probabilities to the behavior's.

    Raises:
        ValueError: the behavior's probabilities are missing, or 0 for an action that was taken; or all weights are 0.

    Warns of poor overlap.
    """
    if behavior is not None:
        base = compute_log_probs(read_steps(OWNER, behavior, steps.data, "behavior"))
    elif steps.data.log_prob is not None:
        base = steps.data.log_prob
    else:
        raise ValueError(
            f"{OWNER}: method={method!r} needs the probabilities with which the data's actions were chosen; load data with "
            "log_probs, or pass behavior=POLICY"
        )
    if np.isneginf(base).any():
        raise ValueError(
            f"{OWNER}: behavior gives probability 0 to the action of {steps.describe_first(np.isneginf(base))}; pass the "
            "policy that has collected the data, or an estimate with a probability above 0 for every action"
        )
    log_ratio = compute_log_probs(steps).astype(np.float64) - base.astype(np.float64)
    ratios = ImportanceRatios(steps.data.reward.astype(np.float64), log_ratio, steps.data.lengths, gamma)
    if method != "dr" and np.isneginf(ratios.log_episode_weight).all():
        raise ValueError(
            f"{OWNER}: all importance weights are 0: the policy would have taken the actions of no whole episode; use "
            "method='fqe', or a policy that explores"
        )
    warn_of_poor_overlap(method, ratios.log_episode_weight)
    return ratios


def _fit_resamples(fqe: FQE, steps: PolicySteps, gamma: float, resamples: int, seed: int) -> tuple[FittedQ, float, Floats]:
    """Q of the policy, and the estimates from the data and from each resample."""
    episodes, choices = steps.data.num_episodes, _choices(fqe, steps, seed)
    counts = np.concatenate([np.ones((1, episodes)), draw_counts(np.random.default_rng(seed), resamples, episodes)])
    q = fit(fqe, steps, choices, counts, gamma, _key(seed, 1))
    values = _state_values(q, steps, choices, _starts(steps))
    warn_of_impossible_values(values, steps, gamma)
    estimates = (counts.T * values).sum(axis=0) / episodes
    return q, float(estimates[0]), estimates[1:]


def _fit_doubly_robust(fqe: FQE, steps: PolicySteps, ratios: ImportanceRatios, q: ActionValues | None, seed: int) -> Estimator:
    """The doubly robust estimator; without `q`, with the critic that has not learned from the episode."""
    episodes, choices = steps.data.num_episodes, _choices(fqe, steps, seed)
    critic = np.zeros(episodes, np.int64)
    if q is None:
        critic = np.random.default_rng(seed).permutation(episodes) % FOLDS
        counts = (critic != np.arange(FOLDS)[:, None]).astype(np.float64)
        q = fit(fqe, steps, choices, counts, ratios.gamma, _key(seed, 1))
    rows = np.arange(len(steps.time_steps.first))
    value = _state_values(q, steps, choices, rows)[rows, np.repeat(critic, steps.data.lengths + 1)]
    obs = take_rows(steps.time_steps.obs, steps.row)
    q_of_action = _map_chunks(partial(_call, q), obs, steps.action)[np.arange(len(steps.row)), critic[steps.episode]]
    next_value = np.where(steps.terminated, 0.0, value[steps.row + 1])
    return doubly_robust(ratios, value[steps.row], q_of_action, next_value)


def _choices(fqe: FQE, steps: PolicySteps, seed: int) -> Choices:
    return compute_choices(steps, _key(seed, 0), fqe.num_action_samples)


def _key(seed: int, number: int) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.key(np.uint32(seed)), number)  # `key` rejects a Python int of 32 bits.


def _starts(steps: PolicySteps) -> npt.NDArray[np.int64]:
    """The rows of the first observations of the episodes `[E]`."""
    return steps.row[steps.data.starts[:-1]]


def _state_values(q: Any, steps: PolicySteps, choices: Choices, rows: npt.NDArray[np.int64]) -> Floats:
    """V(s) = E_{a~π(s)} Q(s, a) of these rows, `[rows, critics]`."""

    def expected_value(obs: PyTree, choices: Choices) -> Float[Array, "B critics"]:
        def weighted_value(k: Array) -> Array:
            probability = choices.probability[:, k, None]
            value = _call(q, obs, jax.tree.map(lambda x: x[:, k], choices.action))
            return jnp.where(probability > 0, probability * value, 0.0)

        return jax.lax.map(weighted_value, jnp.arange(choices.probability.shape[1])).sum(axis=0)

    return _map_chunks(expected_value, *take_rows((steps.time_steps.obs, choices), rows))


def _call(q: ActionValues, obs: PyTree, action: PyTree) -> Float[Array, "B critics"]:
    """Q(s, a) of each row; one critic if Q is the caller's.

    Raises:
        ValueError: the caller's function returns another shape.
    """
    if isinstance(q, FittedQ):
        return q.all_critics(obs, action)
    values, size = jnp.asarray(q(obs, action), jnp.float32), jax.tree.leaves(obs)[0].shape[0]
    if values.shape != (size,):
        raise ValueError(f"{OWNER}: q must return one value for each of {size} observations, got shape {values.shape}")
    return values[:, None]


def _map_chunks(function: Callable[..., Array], *trees: PyTree) -> Floats:
    """The function of all rows, in float64.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    rows, results, program = len(jax.tree.leaves(trees[0])[0]), [], jax.jit(function)
    for start in range(0, rows, CHUNK):
        # The last chunk is filled up with the last row, so that all have one size.
        index = np.minimum(np.arange(start, start + min(CHUNK, rows)), rows - 1)
        results.append(np.asarray(program(*take_rows(trees, index)), np.float64))
    values = np.concatenate(results)[:rows]
    if not np.isfinite(values).all():
        raise ValueError(f"{OWNER}: q returned NaN or infinity")
    return values
