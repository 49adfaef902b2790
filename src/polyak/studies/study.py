"""`polyak.study`: searches for better settings of an algorithm in an environment."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyak.agents import AGENTS
from polyak.core.checks import check_choice, check_integer
from polyak.core.printing import format_number
from polyak.core.suggestions import unknown_name
from polyak.presets import preset
from polyak.runs import check_seed
from polyak.storage.run_directory import directory_path
from polyak.storage.run_files import RunError, write_object
from polyak.storage.toml_files import write_toml
from polyak.studies.jobs import Job, run_jobs
from polyak.studies.journal import BEST, PAGE, SUMMARY, Journal, Trial, open_study
from polyak.studies.page import write_page
from polyak.studies.space import RND, Space, of_rnd, read_space, to_json
from polyak.studies.training import Bench, Outcome, Task

if TYPE_CHECKING:
    import optuna

MAX_WORKERS = 256
"""Maximum number of processes of a study."""


@dataclass(frozen=True)
class StudyResult:
    """The result of `polyak.study`.

    Attributes:
        directory: the directory of the study.
        trials: all trials, by number; trial 0 is the baseline.
        best: the complete trial with the highest score, with `fresh_scores`.
        importances: importance of each setting for the score, which sum to 1; empty with few complete trials.
    """

    directory: Path
    trials: tuple[Trial, ...]
    best: Trial
    importances: Mapping[str, float]


def study(
    algorithm: str,
    env: str,
    *,
    space: str | os.PathLike[str] | Mapping[str, Any] = "preset",
    trials: int,
    seeds: int = 1,
    directory: str | os.PathLike[str],
    workers: int = 1,
    sampler: Literal["tpe", "cma-es"] = "tpe",
    pruner: Literal["median", "hyperband", "none"] = "median",
    seed: int = 0,
    env_steps: int | None = None,
    num_envs: int | None = None,
    evaluations: int = 10,
    eval_episodes: int = 20,
    fresh_seeds: int = 5,
    progress: bool = True,
) -> StudyResult:
    """Search for better settings with Optuna; the same call continues a study that was stopped or killed.

    Trial 0 has the preset's settings. Each trial trains the seeds 0, ..., seeds - 1; its score is the mean reward of the greedy
    policies at the end. The score of the best trial is the maximum of noisy scores, and too high for that reason: so the best
    settings and the preset's train again with other seeds, and are compared by `fresh_scores`.

    A trial fails if the agent rejects its settings, or if its training diverges; the study goes on. An error of the environment
    or the machine stops the study.

    Args:
        algorithm: name of the algorithm.
        env: name of the environment.
        space: a TOML file, a mapping of the same form, or `"preset"` for the space of the algorithm that polyak ships.
        trials: number of trials, including trials of earlier calls.
        seeds: number of seeds of each trial; in an environment in JAX they train in parallel as one program.
        directory: directory of the study; trial 7 has its run directories in `trial-007`.
        workers: number of processes that train trials at the same time. With 1, trials train in this process, and a study that
            was killed has the same trials as one that was not.
        sampler: `"tpe"`, or `"cma-es"` for the settings that have an order.
        pruner: stop a trial early if its best evaluation is below the median of the complete trials, by Hyperband, or never.
        seed: seed of the sampler.
        env_steps: length of each training, which ends with a whole rollout: settings with long rollouts train up to one rollout
            longer; None is the preset's.
        num_envs: number of copies of the environment; None is the preset's.
        evaluations: number of evaluations of each training.
        eval_episodes: number of episodes of each evaluation.
        fresh_seeds: number of other seeds with which the best settings and the preset's train at the end; 0 for none.
        progress: print a line for each trial.

    Raises:
        TypeError, ValueError: an argument or the space is invalid; raised before anything runs.
        RunError: the directory belongs to another study, is in use, or cannot be written; or no trial is complete.
        polyak.studies.training.StudyStopped: an error of the environment or the machine.
        ImportError: the extra `study` is missing.
    """
    require_optuna()
    task = _make_task(algorithm, env, env_steps, num_envs, evaluations, eval_episodes)
    check_choice("study", "sampler", sampler, ("tpe", "cma-es"))
    check_choice("study", "pruner", pruner, ("median", "hyperband", "none"))
    check_seed("study", "seed", seed)
    _check_counts(trials, seeds, workers, fresh_seeds)
    dimensions = read_space(task.algorithm, space)
    options = {**dataclasses.asdict(task), "seeds": seeds, "sampler": sampler, "pruner": pruner, "seed": seed}
    options["space"] = to_json(dimensions)
    path, say = directory_path(directory), print if progress else lambda text: None

    from polyak.studies.optuna_study import build_study, quiet_optuna, rank_settings

    with Bench(task) as bench:
        # Before anything is written.
        bench.check(dimensions)
        with open_study(path, options, dimensions) as journal, quiet_optuna():
            count = task.count_evaluations(seeds)
            found = build_study(journal.trials, dimensions, sampler=sampler, seed=seed, pruner=pruner, evaluations=count)
            _search(bench, found, journal, dimensions, trials, range(seeds), workers, say)
            best = find_best(journal)
            for trial, outcome in _train_again(bench, journal, best, range(seeds, seeds + fresh_seeds), workers):
                journal.add(dataclasses.replace(trial, fresh_scores=outcome.scores, fresh_error=outcome.error))
            result = StudyResult(path, _in_order(journal), journal.trials[best.number], rank_settings(found))
            _write_result(task, options, result)
            return result


def require_optuna() -> None:
    """Import Optuna and cmaes.

    Raises:
        ImportError: one of them is missing; the message has the command that installs it.
    """
    try:
        import cmaes  # noqa: F401
        import optuna  # noqa: F401
    except ImportError as error:
        raise ImportError(f"a study needs {error.name}: pip install 'polyak[study]'") from None


def _check_counts(trials: int, seeds: int, workers: int, fresh_seeds: int) -> None:
    check_integer("study", "trials", trials)
    check_integer("study", "seeds", seeds)
    check_integer("study", "workers", workers, at_most=MAX_WORKERS)
    check_integer("study", "fresh_seeds", fresh_seeds, at_least=0)


def _make_task(
    algorithm: str, env: str, env_steps: int | None, num_envs: int | None, evaluations: int, eval_episodes: int
) -> Task:
    for name, text in {"algorithm": algorithm, "env": env}.items():
        if not isinstance(text, str):
            raise TypeError(f"study: {name} must be a name, got {text!r:.80}")
    algorithm = algorithm.lower()
    if algorithm not in AGENTS:
        raise ValueError(f"study: {unknown_name(algorithm, AGENTS, 'algorithm')}")
    check_integer("study", "env_steps", env_steps, optional=True)
    check_integer("study", "num_envs", num_envs, optional=True)
    check_integer("study", "eval_episodes", eval_episodes)
    defaults = preset(algorithm, env)
    env_steps = env_steps or defaults.env_steps
    check_integer("study", "evaluations", evaluations, at_most=env_steps)
    return Task(algorithm, env, env_steps, num_envs or defaults.num_envs, evaluations, eval_episodes)


def _search(
    bench: Bench,
    found: "optuna.Study",
    journal: Journal,
    space: Space,
    count: int,
    seeds: Sequence[int],
    workers: int,
    say: Callable[[str], None],
) -> None:
    """Run trials until so many have ended."""
    from polyak.studies.optuna_study import ask_trial, count_begun, tell_trial

    begun: dict[str, optuna.Trial] = {}

    def jobs() -> Iterator[Job]:
        while count_begun(found) < count:
            trial, settings = ask_trial(found, space)
            name = f"trial {trial.number}"
            begun[name] = trial
            known = set[int]()

            def report(step: int, reward: float, trial: "optuna.Trial" = trial, known: set[int] = known) -> bool:
                # A trial that began again, as its process died, reports once more.
                if step not in known:
                    trial.report(reward, step)
                known.add(step)
                # A bool of NumPy is no JSON data for a process.
                return bool(trial.should_prune())

            yield Job(name, settings, seeds, journal.path.parent / f"trial-{trial.number:03d}", report)

    for job, outcome in run_jobs(bench, jobs(), workers):
        ended = tell_trial(found, begun.pop(job.name), job.settings, outcome.state, outcome.scores, outcome.error)
        journal.add(ended)
        text = ended.error or ("no evaluation" if ended.score is None else format_number(ended.score))
        say(f"{job.name}: {ended.state}, {text}  {dict(ended.settings) or 'preset'}")


def _in_order(journal: Journal) -> tuple[Trial, ...]:
    return tuple(journal.trials[number] for number in sorted(journal.trials))


def find_best(journal: Journal) -> Trial:
    """Return the complete trial with the highest score, the first of equal ones.

    Raises:
        RunError: no trial is complete.
    """
    complete = [trial for trial in _in_order(journal) if trial.state == "complete"]
    if not complete:
        errors = [trial.error for trial in _in_order(journal) if trial.error]
        raise RunError(f"{journal.path.parent}: no trial is complete; the last error: {errors[-1] if errors else 'none'}")
    return max(complete, key=lambda trial: (trial.score, -trial.number))


def _train_again(
    bench: Bench, journal: Journal, best: Trial, seeds: Sequence[int], workers: int
) -> Iterator[tuple[Trial, Outcome]]:
    """Train the preset's settings and the best ones with seeds that the search has not used."""
    known = {f"trial {number} with fresh seeds": journal.trials[number] for number in (0, best.number)}
    jobs = [
        Job(name, trial.settings, seeds, journal.path.parent / "fresh" / f"trial-{trial.number:03d}", _never_prune)
        for name, trial in known.items()
        if trial.state != "failed" and trial.fresh_error is None and len(trial.fresh_scores) != len(seeds)
    ]
    for job, outcome in run_jobs(bench, jobs if seeds else [], workers):
        yield known[job.name], outcome


def _never_prune(step: int, reward: float) -> bool:
    return False


def flags_of(task: Task, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of `polyak train` for the trainings of a trial, by name."""
    around = {"intrinsic_reward": RND} if of_rnd(settings) else {}
    return {"env_steps": task.env_steps, "num_envs": task.num_envs, **around, **settings}


def _write_result(task: Task, options: Mapping[str, Any], result: StudyResult) -> None:
    """Write the best settings, all trials and the report."""
    path, best = result.directory, result.best
    content = {
        "options": dict(options),
        "best": best.number,
        "importances": dict(result.importances),
        "trials": [dataclasses.asdict(trial) for trial in result.trials],
    }
    write_object(path / SUMMARY, content)
    write_toml(
        path / BEST,
        flags_of(task, best.settings),
        f"polyak train {task.algorithm} {task.env} --preset {BEST}  (trial {best.number})",
    )
    title = f"{task.algorithm} {task.env}"
    write_page(path / PAGE, title, result.trials, best, result.importances)
