"""The trainings of one trial: its settings become an agent, which trains with several seeds and is scored."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyak.agents import action_scaling_of, agent_class
from polyak.core.types import Callback, Progress
from polyak.envs.constructors import is_in_jax, make
from polyak.envs.source import EnvSource
from polyak.loops.loop import TrainingDiverged
from polyak.presets import preset
from polyak.presets.preset import with_length
from polyak.studies.space import NETWORK_SETTINGS, RND, Space, of_rnd, typed
from polyak.train.evaluation import REWARD, close_envs
from polyak.train.new_training import make_agent, run
from polyak.train.result import Result
from polyak.train.seeds import run_seeds

NETWORKS = ("network", "actor", "critics")

Report = Callable[[int, float], bool]
"""Called with the number of an evaluation and the mean reward; True prunes the trial."""


@dataclass(frozen=True)
class Task:
    """The training of every trial.

    Attributes:
        algorithm: name of the algorithm.
        env: name of the environment.
        env_steps: length of a training.
        num_envs: number of copies of the environment.
        evaluations: number of evaluations of a training, after each of which a trial may be pruned.
        eval_episodes: number of episodes of an evaluation.
    """

    algorithm: str
    env: str
    env_steps: int
    num_envs: int
    evaluations: int
    eval_episodes: int

    @property
    def trains_in_parallel(self) -> bool:
        """True if several seeds train as one program: the environment is in JAX, and the algorithm has no workers."""
        return is_in_jax(self.env) and preset(self.algorithm, self.env).loop == "auto"

    def count_evaluations(self, seeds: int) -> int:
        """Return the number of evaluations of a trial, after which `Report` is called."""
        return self.evaluations if self.trains_in_parallel else seeds * self.evaluations


@dataclass(frozen=True)
class Outcome:
    """The end of a trial: its scores; or an error; or neither, if it was pruned.

    Attributes:
        scores: mean reward of each seed at the end.
        error: why the settings are invalid, or how a training diverged.
    """

    scores: tuple[float, ...] = ()
    error: str | None = None

    @property
    def state(self) -> str:
        """State of a `Trial`."""
        return "failed" if self.error is not None else "complete" if self.scores else "pruned"


class StudyStopped(Exception):
    """An error of the environment or the machine, which other settings would not mend; the message names the trial."""


class Bench:
    """Trains the trials of one task in this process; a context manager that closes the environment it asks for its spaces."""

    def __init__(self, task: Task) -> None:
        self.task = task
        scaling = action_scaling_of(task.algorithm)
        self._env: Any = make(task.env, num_envs=1, action_scaling=scaling)
        self._source = EnvSource(task.env, {"action_scaling": scaling})

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        close_envs(self._env)

    def check(self, space: Space) -> None:
        """Check the preset's settings, and, if a space has settings of `[rnd]`, that RND takes the agent.

        Raises:
            TypeError, ValueError: the agent rejects a setting, or RND the agent.
        """
        self.make_fields({})
        if of_rnd(space):
            self.surround({}, {})

    def make_fields(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the agent that differ from the preset, without the settings of `[rnd]`.

        Raises:
            TypeError, ValueError: the agent rejects a setting, or settings that do not go together.
        """
        task, spec = self.task, self._env.spec
        fields = {
            name: typed(value)
            for name, value in settings.items()
            if name not in NETWORK_SETTINGS and not name.startswith(f"{RND}_")
        }
        agent = make_agent(task.algorithm, spec, self._source, task.env_steps, fields)
        of_network = {name: typed(settings[name]) for name in NETWORK_SETTINGS if name in settings}
        if of_network:
            changed: Any = agent
            parts = {name: getattr(changed, name) for name in NETWORKS if getattr(changed, name, None) is not None}
            fields |= {name: dataclasses.replace(part, **of_network) for name, part in parts.items()}
            agent = make_agent(task.algorithm, spec, self._source, task.env_steps, fields)
        agent.check(task.num_envs, 1)
        return fields

    def surround(self, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
        """Return `polyak.RND` with these settings around the agent with these fields.

        Raises:
            TypeError, ValueError: the agent does not learn from rollouts or sends gradients, or RND rejects a setting.
        """
        task = self.task
        if preset(task.algorithm, task.env).loop == "asynchronous":
            raise TypeError(f"study: {task.algorithm} sends gradients, but RND sends no gradients; use A2C or IMPALA")
        agent = make_agent(task.algorithm, self._env.spec, self._source, task.env_steps, fields)
        values = {name: with_length(typed(value), task.env_steps) for name, value in settings.items()}
        surrounded = agent_class(RND)(agent, **values)
        surrounded.check(task.num_envs, 1)
        return surrounded

    def train(self, settings: Mapping[str, Any], seeds: Sequence[int], directory: Path, report: Report) -> Outcome:
        """Train the seeds with the settings, each in a run directory below `directory`, which is replaced if it exists.

        Raises:
            KeyboardInterrupt: the training was stopped by a signal.
            Exception: an error of the environment or the machine.
        """
        try:
            fields = self.make_fields(settings)
            agent = self.surround(fields, changes) if (changes := of_rnd(settings)) else self.task.algorithm
        except (TypeError, ValueError) as error:
            return Outcome(error=str(error))
        shutil.rmtree(directory, ignore_errors=True)
        progress = _Evaluations(self.task, seeds, report)
        try:
            results = self._train_seeds(agent, fields if isinstance(agent, str) else None, seeds, directory, progress)
        except TrainingDiverged as error:
            return Outcome(error=f"diverged: {error}")
        if any(result.stopped == "interrupt" for result in results):
            raise KeyboardInterrupt
        if diagnosis := next((result.diagnosis for result in results if result.diagnosis is not None), None):
            return Outcome(error=f"diverged: {diagnosis}")
        if progress.is_pruned:
            return Outcome()
        rewards = list(map(_score, results))
        if not np.isfinite(rewards).all():
            return Outcome(error="no score: the episodes of an evaluation did not end, or their reward is not finite")
        return Outcome(tuple(map(float, rewards)))

    def _train_seeds(
        self, agent: Any, fields: Mapping[str, Any] | None, seeds: Sequence[int], directory: Path, progress: "_Evaluations"
    ) -> list[Result[Any]]:
        task = self.task
        shared: dict[str, Any] = {
            "env_steps": task.env_steps,
            "num_envs": task.num_envs,
            "settings": fields,
            "progress": False,
            "eval_every": progress.every,
            "eval_episodes": task.eval_episodes,
            "should_stop": lambda: progress.is_pruned,
        }
        if task.trains_in_parallel:
            return run_seeds(agent, task.env, seeds=list(seeds), run_dir=directory, callbacks=progress.callbacks, **shared)
        results: list[Result[Any]] = []
        for seed in seeds:
            place, callbacks = directory / f"seed-{seed}", progress.callbacks(seed)
            results.append(run(agent, task.env, seed=seed, run_dir=place, callbacks=callbacks, **shared))
            # Without a score of one seed the trial has none.
            if results[-1].stopped is not None or not math.isfinite(_score(results[-1])):
                break
        return results


def _score(result: Result[Any]) -> float:
    return result.evaluation.mean_return if result.evaluation else math.nan


class _Evaluations:
    """Reports the evaluations of a trial, and knows if it is pruned.

    Seeds that train in parallel report their mean. Seeds that train one after another report the mean over the last evaluation
    of each seed so far, so that a trial can be pruned by its first seed.
    """

    def __init__(self, task: Task, seeds: Sequence[int], report: Report) -> None:
        self.every, self.is_pruned = max(1, task.env_steps // task.evaluations), False
        self._task, self._seeds, self._report = task, list(seeds), report
        self._rewards: dict[int, dict[int, float]] = {seed: {} for seed in seeds}

    def callbacks(self, seed: int) -> list[Callback]:
        """Return the callback of a seed."""

        def report(progress: Progress, metrics: Mapping[str, float], state: Any) -> None:
            if REWARD in metrics and not self.is_pruned:
                is_end = progress.env_steps >= progress.target_env_steps
                number = self._task.evaluations if is_end else min(progress.env_steps // self.every, self._task.evaluations)
                self._add(seed, number, float(metrics[REWARD]))

        return [report]

    def _add(self, seed: int, number: int, reward: float) -> None:
        if number in self._rewards[seed] or not math.isfinite(reward):
            return
        self._rewards[seed][number] = reward
        position = self._seeds.index(seed)
        if self._task.trains_in_parallel:
            rewards, step = [rewards.get(number) for rewards in self._rewards.values()], number
        else:
            before = [list(self._rewards[other].values())[-1:] for other in self._seeds[:position]]
            rewards, step = [*(last for (last,) in before), reward], position * self._task.evaluations + number
        known = [one for one in rewards if one is not None]
        if len(known) == len(rewards):
            prunes = self._report(step, float(np.mean(known)))
            # The end of the training leaves nothing to prune.
            self.is_pruned = prunes and step < self._task.count_evaluations(len(self._seeds))
