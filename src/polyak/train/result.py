"""The result of training: evaluates, saves and exports the policy."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from polyak.core.checks import check_integer
from polyak.core.printing import format_number
from polyak.core.suggestions import suggest_arguments, suggest_attributes
from polyak.core.tags import RETURN
from polyak.core.types import Agent, Env, HostEnv, Policy, Progress, State, TrainedPolicy
from polyak.core.warn import warn
from polyak.export.write_policy import SUFFIXES, Format, write_policy
from polyak.loops.evaluate import Evaluation
from polyak.loops.loop import LoopState
from polyak.reports.curves import XAxis
from polyak.reports.plots import plot
from polyak.reports.records import load_run, record_training
from polyak.runs import RunConfig, check_seed
from polyak.storage.columns import to_columns
from polyak.storage.json import finite_or_none
from polyak.storage.progress import replay_path, save_state
from polyak.storage.run_directory import Run, create
from polyak.train.evaluation import evaluate_policy, evaluation_env
from polyak.train.summary import format_return, make_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@suggest_attributes
@dataclass(frozen=True, repr=False)
class Result(Generic[State]):
    """The result of `polyak.train.run` and `polyak.resume`.

    Attributes:
        agent: the agent that was trained.
        state: the agent's state.
        loop_state: the complete state of the loop; pass it to `run` as `resume_from` to continue in this process.
        progress: env_steps, seconds and steps per second at the end.
        metrics: the metrics of the last report.
        stopped: None if training reached `env_steps`, else the reason: `"interrupt"` (Ctrl-C or SIGTERM), `"callback"`,
            `"request"` (`should_stop`), or `"diverged"` for one of several seeds.
        diagnosis: why this seed diverged, or None.
        evaluation: the evaluation at the end of training, or None.
        evaluations: the evaluations during training (`eval_every`), by env_steps.
        best_policy: the policy with the highest mean return of `evaluations`, or None.
        run_dir: the run directory, or None.
        env: the environment; None for a training on data without one.
        config: the settings that a run directory stores.
        snapshot: the state of a host environment at the end, or None.
        history: the metrics of each report, with its `env_steps`, of a training without a run directory.
    """

    agent: Agent[State]
    state: State
    loop_state: LoopState
    progress: Progress
    metrics: Mapping[str, float]
    config: RunConfig
    env: Env | HostEnv | None
    stopped: str | None = None
    diagnosis: str | None = None
    evaluation: Evaluation | None = None
    evaluations: Mapping[int, Evaluation] = field(default_factory=dict)
    best_policy: Policy | None = None
    run_dir: Path | None = None
    snapshot: dict[str, Any] | None = None
    history: Sequence[Mapping[str, float]] = ()

    @property
    def policy(self) -> TrainedPolicy:
        """The greedy policy, ready to `predict(obs)`."""
        policy: Any = self.agent.policy(self.state)
        return policy

    @suggest_arguments("Result.evaluate")
    def evaluate(
        self, episodes: int = 100, *, env: Env | HostEnv | None = None, seed: int = 0, max_steps: int | None = None
    ) -> Evaluation:
        """Evaluate the greedy policy in complete episodes, as `polyak evaluate` does.

        Args:
            episodes: number of episodes.
            env: the environment; None creates copies of the training environment.
            seed: determines the starts of the episodes.
            max_steps: maximum number of steps of each environment; None is the run's `eval_max_steps`.

        Raises:
            TypeError, ValueError: `episodes`, `seed` or `max_steps` is out of range.
            TimeoutError: `max_steps` passed before all episodes had ended.
            ValueError: `env` is None, and there was no environment, or one that was passed to `polyak.envs.make` as an object.
        """
        check_integer("Result.evaluate", "episodes", episodes)
        check_seed("Result.evaluate", "seed", seed)
        check_integer("Result.evaluate", "max_steps", max_steps, optional=True)
        with evaluation_env(self.env, episodes, env) as copies:
            return evaluate_policy(copies, self.policy, episodes, seed, max_steps or self.config.eval_max_steps)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a run directory, for `polyak.load_policy`, `polyak.resume` and the command line; returns its path.

        Raises:
            RunError: the directory is not new or empty, or cannot be written; or the metrics of `run_dir` are damaged.
            CheckpointError: the agent's state contains NaN or infinity.
        """
        rows = self.history if self.run_dir is None else Run(self.run_dir).read_metrics()
        # A resumed training may have continued the run directory.
        rows = [row for row in rows if row["env_steps"] <= self.progress.env_steps]
        with create(path, self.config.to_json()) as run:
            if self.run_dir is not None and not rows:
                warn(f"Result.save: {path} has no metrics, as {self.run_dir} has none any more")
            replay, save_replay = replay_path(self.agent), self.config.checkpoint_replay
            save_state(run, self.progress, self.loop_state, self.snapshot, replay=replay, save_replay=save_replay)
            for row in rows:
                run.append_metrics(row)
            run.write_summary(make_summary(self.config, self.progress, self.evaluation, stopped=self.stopped))
            return run.directory

    def export(self, path: str | os.PathLike[str], format: Format | None = None) -> list[Path]:
        """Write the greedy policy to a file for deployment; returns the files.

        Args:
            path: the file, replaced if it exists; `numpy` also writes `numpy_reader.py` next to it.
            format: `"stablehlo"`, `"onnx"` or `"numpy"`; None follows from the suffix `.stablehlo`, `.onnx` or `.npz`.

        Raises:
            ValueError: the suffix names no format, or the format does not support the policy.
            ExportError: the file cannot be written.
            ImportError: the extra `onnx` is missing.
        """
        output = Path(path)
        formats = {suffix: name for name, suffix in SUFFIXES.items()}
        chosen: Any = formats.get(output.suffix) if format is None else format
        if chosen not in SUFFIXES:
            wanted = f"end with {', '.join(formats)}" if format is None else f"have a format of {', '.join(SUFFIXES)}"
            raise ValueError(f"Result.export: path must {wanted}, got {output if format is None else repr(format)}")
        about = {"algorithm": self.config.algorithm, "env": self.config.env, "env_steps": self.progress.env_steps}
        return write_policy(self.policy, self.agent.spec, chosen, output, about)

    @suggest_arguments("Result.plot")
    def plot(
        self,
        y: str | Sequence[str] = RETURN,
        *,
        x: XAxis = "env_steps",
        output: str | os.PathLike[str] | None = None,
        width: str | float = "text",
        height: str | float | None = None,
    ) -> "Figure":
        """Draw the curve of a tag; `polyak.plot` compares several runs.

        Args:
            y: tag of the metrics, or several, each in its own panel.
            x: `"env_steps"`, or `"time"` for the time of training.
            output: file to write; see `polyak.plot`, also for the sizes.
            width: width of the picture.
            height: height of the picture.

        Returns:
            The figure of matplotlib.

        Raises:
            ValueError: there are no such metrics, or an argument is invalid.
            RunError: the run directory was removed or damaged.
            OSError: the output cannot be written.
            ImportError: the extra `plots` is missing.
        """
        if self.run_dir is not None:
            return plot(load_run(self.run_dir), y=y, x=x, output=output, width=width, height=height)
        if not self.history:
            raise ValueError("Result.plot: there are no metrics of this training; pass run_dir= to polyak.train.run")
        columns = to_columns([finite_or_none(row) for row in self.history], None, "Result.plot")
        record = record_training(self.config.to_json(), columns)
        return plot(record, y=y, x=x, output=output, width=width, height=height)

    def __repr__(self) -> str:
        title, *lines = self._summary()
        stopped = f", stopped by {self.stopped}" if self.stopped else ""
        return "\n".join([f"Result({' '.join(title)}{stopped})", *(f"  {name}: {text}" for name, text in lines)])

    def _summary(self) -> list[tuple[str, str]]:
        """Return the lines of the summary as (name, text); the first line is the task."""
        progress = self.progress
        steps = f"{progress.env_steps:,} of {progress.target_env_steps:,} {self.config.unit} in {progress.seconds:.1f} s"
        mean = self.metrics.get("rollout/ep_rew_mean")
        lines = {
            f"{self.config.algorithm} {self.config.env}:": steps,
            "mean return of the last episodes": None if mean is None else format_number(mean),
            "greedy return": None if self.evaluation is None else format_return(self.evaluation),
            "run directory": None if self.run_dir is None else str(self.run_dir),
        }
        return [(name, text) for name, text in lines.items() if text is not None]
