"""SAC with a tenth of an expert's data beside its replay (RLPD) against plain SAC: env_steps to a score.

    python benchmarks/prior_data.py [--env jax/Pendulum-v1] [--score -200] [--env-steps 3000] [--data PATH] [--json PATH]

The expert is SAC: `--data` is a data set or a run of it, or else its replay after three times `--env-steps` is. Both
agents have the settings of RLPD (arXiv:2302.02948), layer normalization of the critics and several gradient steps for each
step of one environment, and are evaluated forty times, until they have the score twice in a row.
"""

import argparse
import tempfile
from typing import Any

from harness import arguments, report, table

import polyak


def train(args: argparse.Namespace, seed: int, data: polyak.data.DataSet | None) -> dict[int, float]:
    """The mean returns by env_steps."""
    returns: list[float] = []

    def note(progress: Any, metrics: Any, state: Any) -> None:
        if "eval/mean_reward" in metrics:
            returns.append(metrics["eval/mean_reward"])

    settings: dict[str, Any] = {
        "num_steps": 1,
        "batch_size": args.batch,
        "learning_starts": args.learning_starts,
        "updates_per_step": args.updates_per_step,
        "critics": polyak.Critics(num_critics=args.critics, norm="layer"),
        "num_target_critics": 2 if args.critics > 2 else None,
    }
    if args.learning_rate is not None:
        settings["learning_rate"] = args.learning_rate
    result = polyak.train.run(
        "sac",
        args.env,
        env_steps=args.env_steps,
        num_envs=1,
        seed=seed,
        data=data,
        settings=settings,
        eval_every=args.env_steps // 40,
        eval_episodes=args.episodes,
        progress=False,
        callbacks=[note],
        should_stop=lambda: len(returns) > 1 and min(returns[-2:]) >= args.score,
    )
    return {step: evaluation.mean_return for step, evaluation in result.evaluations.items() if evaluation is not None}


def load(args: argparse.Namespace) -> polyak.data.DataSet:
    """A tenth of the episodes of the expert's data."""
    if args.data is None:
        expert = polyak.train.run("sac", args.env, env_steps=3 * args.env_steps, num_envs=1, seed=100, progress=False)
        with tempfile.TemporaryDirectory() as directory:
            data = polyak.data.load(expert.save(directory))
    else:
        data = polyak.data.load(args.data)
    return data.split(0.1, seed=0)[0]


def steps_to(score: float, returns: dict[int, float]) -> float:
    """The first step with a return of at least `score`; infinity for none."""
    return min((step for step, value in returns.items() if value >= score), default=float("inf"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--env", default="jax/Pendulum-v1")
    parser.add_argument("--score", type=float, default=-200.0)
    parser.add_argument("--env-steps", type=int, default=3_000)
    parser.add_argument("--data", help="a data set, or a run directory, of the expert")
    parser.add_argument("--batch", type=int, default=128, help="transitions of a gradient step")
    parser.add_argument("--critics", type=int, default=2)
    parser.add_argument("--updates-per-step", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, help="default: the preset's")
    parser.add_argument("--episodes", type=int, default=10, help="episodes of each evaluation")
    parser.add_argument("--learning-starts", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    args.env_steps = 1_000 if args.quick else args.env_steps
    data = load(args)
    print(data, flush=True)
    rows, curves = [], []
    for seed in range(args.seeds):
        plain, mixed = (train(args, seed, used) for used in (None, data))
        reached = [steps_to(args.score, returns) for returns in (plain, mixed)]
        rows.append([str(seed), *(f"{step:,.0f}" for step in reached), f"{reached[1] / reached[0]:.2f}"])
        curves.append({"plain": plain, "with data": mixed})
        print(table(["seed", f"{args.score:g} after", "with data after", "ratio"], rows), flush=True)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    report(str(data), {"settings": settings, "curves": curves}, args.json)


if __name__ == "__main__":
    main()
