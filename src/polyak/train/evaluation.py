"""Evaluation of the greedy policy of a result or a run, and at intervals during training."""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

import jax
from jaxtyping import PRNGKeyArray

from polyak import envs
from polyak.core.printing import format_number
from polyak.core.tags import RETURN
from polyak.core.types import Agent, Env, HostEnv, Policy, Progress, PyTree
from polyak.core.warn import warn
from polyak.envs.constructors import is_in_jax
from polyak.envs.source import EnvSource, can_make_again, source_of
from polyak.loops.evaluate import Evaluation, UnendedEpisodes, evaluate
from polyak.loops.loop import check_made, check_spec
from polyak.runs import RunConfig, run_key
from polyak.storage.progress import replay_path, save_state, snapshot_of
from polyak.storage.run_directory import Run
from polyak.train.display import Display

# Tags of Stable-Baselines3.
REWARD, LENGTH, SUCCESS = "eval/mean_reward", "eval/mean_ep_length", "eval/success_rate"


def run_source(config: RunConfig, target: str | Callable[[], Any] | None = None) -> EnvSource:
    """Return the source of a run's environment, or of another one with the same action scaling.

    The function or class of a user-defined environment, given again, has the run's options too, and a class in JAX the
    `--env-kwargs` of a run of the command line.

    Raises:
        ValueError: `target` is a class in JAX, and `env_kwargs` had texts, which a run does not store.
    """
    options: dict[str, Any] = {"action_scaling": config.action_scaling}
    if target is None:
        options |= {"env_kwargs": config.env_kwargs, "import_modules": False, **config.env_options}
    elif config.is_user_env and ((is_jax := is_in_jax(target)) or can_make_again(target)):
        # The pool of initial states is for environments in JAX, all other options are for Gymnasium's.
        options |= {name: value for name, value in config.env_options.items() if (name == "reset_pool") == is_jax}
        if is_jax and isinstance(target, type):
            if texts := config.user_flags.get("env_kwargs"):
                raise ValueError(
                    f"env must be an environment: the run had texts in env_kwargs ({', '.join(texts)}), which a run does not "
                    f"store; pass env=polyak.envs.make({target.__name__}, num_envs=..., env_kwargs=...)"
                )
            options["env_kwargs"] = config.env_kwargs
    return EnvSource(config.env if target is None else target, options)


def make_again(run: Run, config: RunConfig, env: Any, num_envs: int) -> Env | HostEnv:
    """Create the environments of a run that is resumed, or of another source, `env`; existing ones are returned.

    Raises:
        ValueError: the environment is user-defined and not given.
    """
    if isinstance(env, Env | HostEnv):
        return env
    if env is None and config.is_user_env:
        raise ValueError(
            f"polyak.resume: env must be passed: {config.env!r} of {run.directory} is a user-defined environment, which a run "
            "does not store; pass env=..., as in the training"
        )
    source = run_source(config, env)
    return envs.make(source.id, num_envs=num_envs, **source.options)


@contextmanager
def evaluation_env(env: Env | HostEnv | None, episodes: int, given: Env | HostEnv | None = None) -> Iterator[Env | HostEnv]:
    """Yield environments for evaluation: the given environments, or copies of the training environments, closed at the end.

    An environment in JAX is stateless and needs no copy.

    Raises:
        ValueError: no environments are given, and there are no training environments, or their source is unknown.
    """
    if given is not None:
        yield given
        return
    if env is None:
        raise ValueError("evaluation: env must be passed, as the training on data had no environment")
    if not isinstance(env, HostEnv):
        yield env
        return
    source = require_source(env)
    copy = cast(HostEnv, envs.make(source.id, num_envs=min(env.num_envs, episodes), **source.options))
    try:
        yield copy
    finally:
        close_envs(copy)


def close_envs(env: Env | HostEnv) -> None:
    """Close environments; an exception in `close` becomes a warning, so that the result of training is not lost."""
    if not isinstance(env, HostEnv):
        return
    try:
        env.close()
    except Exception as error:
        warn(f"{env.spec.id}: close() raised {type(error).__name__}: {error}; the results are not affected")


def check_eval_env(
    owner: str, agent: Agent, env: Env | HostEnv, eval_env: Any, eval_every: int | None, eval_episodes: int
) -> None:
    """Check that environments for evaluation fit the agent, and differ from the training environments.

    Raises:
        TypeError, ValueError: the environments do not fit, or are the training environments; or there are none, and no
            copies can be made.
    """
    if eval_env is None:
        if (eval_every or eval_episodes) and isinstance(env, HostEnv):
            require_source(env)
        return
    check_made(owner, eval_env, "eval_env")
    check_spec(f"{owner}: eval_env", agent.spec, eval_env.spec)
    if eval_every and eval_env is env and isinstance(env, HostEnv):
        raise ValueError(f"{owner}: eval_env must not be env with eval_every: an evaluation would reset it within the training")


def require_source(env: HostEnv) -> EnvSource:
    """Return the source from which the environments were created.

    Raises:
        ValueError: the source is unknown.
    """
    source = source_of(env)
    if source is None:
        raise ValueError(
            f"evaluation: eval_env must be passed: {env.spec.id} was given to polyak.envs.make as an object, so no second one "
            "can be made; pass eval_env=polyak.envs.make(...)"
        )
    return source


def evaluation_key(seed: int) -> PRNGKeyArray:
    """Return the key of an evaluation with a seed; training with the same seed never uses this key."""
    key: PRNGKeyArray = jax.random.fold_in(run_key(seed), 0x65766C)
    return key


def evaluate_policy(env: Env | HostEnv, policy: Policy, episodes: int, seed: int, max_steps: int) -> Evaluation:
    """Evaluate a policy; the seed determines the starts of the episodes; each environment takes at most `max_steps` steps.

    Raises:
        UnendedEpisodes: an episode does not end.
    """
    return evaluate(policy, env, episodes=episodes, key=evaluation_key(seed), max_steps=max_steps)


def evaluate_if_it_ends(
    env: Env | HostEnv,
    policy: Policy,
    episodes: int,
    seed: int,
    max_steps: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate a policy as `evaluate_policy` does; returns None, with a warning, if an episode does not end.

    So an evaluation never costs the trained policy. `should_stop` returns True to skip the rest of the evaluation.
    """
    key = evaluation_key(seed)
    try:
        return evaluate(policy, env, episodes=episodes, key=key, max_steps=max_steps, should_stop=should_stop)
    except UnendedEpisodes as error:
        warn(f"{error}; this evaluation is skipped")
        return None


def describe_limit(metrics: Mapping[str, float], max_steps: int) -> str:
    """A remark about an evaluation that may take long, as no episode of the training has ended; else an empty text.

    Without metrics nothing was trained: a finished run was resumed, whose episodes have ended or not.
    """
    has_ended = not metrics or RETURN in metrics
    return "" if has_ended else f"no episode has ended yet; eval_max_steps={max_steps:,} ends the evaluation"


class PeriodicEvaluation:
    """A callback that evaluates the greedy policy, adds the result to the metrics, and keeps the best policy.

    Episodes start equally in every evaluation, so that only changes of the policy change the result. Evaluation uses neither
    the environments nor the random numbers of training, so training gives the same bits with and without evaluation.

    Args:
        agent: the agent.
        env: environments for evaluation.
        every: env_steps between evaluations; the last evaluation is at the end of training.
        episodes: number of episodes of each evaluation.
        max_steps: maximum number of steps of each environment in an evaluation.
        seed: determines the starts of the episodes.
        env_steps_done: env_steps before the resume.
        run: receives the best checkpoint in `best/`; None writes nothing.
        on_evaluation: called with the tuple `(env_steps, evaluation)` of every evaluation.
        display: shows the start and the result of each evaluation.
        label: prefix of the shown result, to distinguish seeds that train together.
        unit: what env_steps count.
        should_stop: True skips the rest of an evaluation, as training is to stop.
    """

    def __init__(
        self,
        agent: Agent,
        env: Env | HostEnv,
        *,
        every: int,
        episodes: int,
        max_steps: int,
        seed: int,
        env_steps_done: int = 0,
        run: Run | None = None,
        on_evaluation: Callable[[tuple[int, Evaluation]], None] = lambda pair: None,
        display: Display | None = None,
        label: str = "",
        unit: str = "env_steps",
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._display, self._label, self._unit, self._should_stop = display, label, unit, should_stop
        self._agent, self._env, self._run, self._on_evaluation = agent, env, run, on_evaluation
        self._every, self._episodes, self._max_steps, self._seed = every, episodes, max_steps, seed
        self._last = env_steps_done
        self.evaluations: dict[int, Evaluation] = {}
        self.best_policy: Policy | None = None
        rows = run.read_metrics() if run else []
        # A mean return that is NaN, which rows have as None, is never the best.
        self._best = max((row[REWARD] for row in rows if row.get(REWARD) is not None), default=-math.inf)

    def __call__(self, progress: Progress, metrics: MutableMapping[str, float], state: PyTree) -> None:
        """Evaluate if it is due."""
        now = progress.env_steps
        is_end = now >= progress.target_env_steps
        if now // self._every == self._last // self._every and not is_end:
            return
        self._last = now
        policy = self._agent.policy(state.agent)
        if self._display is not None:
            self._display.show_activity(progress, [f"evaluating {self._episodes} episodes …", "evaluating …"])
            if self._unit == "env_steps" and (limit := describe_limit(metrics, self._max_steps)):
                self._display.print_text(self._label + limit)
        evaluation = evaluate_if_it_ends(self._env, policy, self._episodes, self._seed, self._max_steps, self._should_stop)
        if evaluation is None:
            return
        self.evaluations[now] = evaluation
        self._on_evaluation((now, evaluation))
        metrics.update(evaluation_metrics(evaluation))
        is_best = evaluation.mean_return > self._best
        if is_best:
            self._best, self.best_policy = evaluation.mean_return, policy
            if self._run is not None:
                # Without the replay: the checkpoint is for its policy only, and no run resumes from it.
                run, snapshot, replay = self._run, snapshot_of(progress), replay_path(self._agent)
                save_state(run, progress, state, snapshot, keep=1, directory=run.best, replay=replay, save_replay=False)
        if self._display is not None:
            saved = "" if self._run is None else f", saved in {self._run.best.name}/"
            best = f" (best{saved})" if is_best else ""
            result = format_number(evaluation.mean_return) + best
            self._display.print_text(f"{self._label}evaluated at {now:,} {self._unit}: mean return {result}")


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation, by tag."""
    metrics = {REWARD: evaluation.mean_return, LENGTH: evaluation.mean_length}
    return metrics if evaluation.success_rate is None else metrics | {SUCCESS: evaluation.success_rate}
