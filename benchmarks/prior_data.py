"""SAC with an expert's data beside its replay (RLPD) against plain SAC: env_steps to a score.

    python benchmarks/prior_data.py [--env jax/Pendulum-v1] [--score -200] [--env-steps 8000] [--seeds 3] [--json PATH]

The expert is SAC after three times as many steps; a tenth of `--env-steps` are recorded from its greedy policy. Each agent
takes a gradient step for each step of one environment, and is evaluated in 20 episodes twenty times.
"""

import jax
from harness import arguments, report, table

import polyak


def train(env: str, env_steps: int, seed: int, data: polyak.data.DataSet | None) -> dict[int, float]:
    """The mean returns by env_steps."""
    result = polyak.train.run(
        "sac",
        env,
        env_steps=env_steps,
        num_envs=1,
        seed=seed,
        data=data,
        settings={"num_steps": 1, "learning_starts": 250},
        eval_every=env_steps // 20,
        eval_episodes=20,
        progress=False,
    )
    return {step: evaluation.mean_return for step, evaluation in result.evaluations.items() if evaluation is not None}


def record(env: str, env_steps: int) -> polyak.data.DataSet:
    """Transitions of an expert, a tenth of `env_steps`."""
    expert = polyak.train.run("sac", env, env_steps=3 * env_steps, num_envs=1, seed=100, progress=False)
    made = polyak.envs.make(env, num_envs=1, action_scaling="rescale")
    return polyak.data.collect(expert.policy, made, env_steps // 10, key=jax.random.key(0))


def steps_to(score: float, returns: dict[int, float]) -> float:
    """The first step with a return of at least `score`; infinity for none."""
    return min((step for step, value in returns.items() if value >= score), default=float("inf"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--env", default="jax/Pendulum-v1")
    parser.add_argument("--score", type=float, default=-200.0)
    parser.add_argument("--env-steps", type=int, default=8_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    args.env_steps = 1_000 if args.quick else args.env_steps
    data = record(args.env, args.env_steps)
    rows, curves = [], []
    for seed in range(args.seeds):
        plain, mixed = (train(args.env, args.env_steps, seed, used) for used in (None, data))
        reached = [steps_to(args.score, returns) for returns in (plain, mixed)]
        rows.append([str(seed), *(f"{step:,.0f}" for step in reached)])
        curves.append({"plain": plain, "with data": mixed})
        print(table(["seed", f"{args.score:g} after", "with data after"], rows), flush=True)
    report(str(data), {"env": args.env, "env_steps": args.env_steps, "curves": curves}, args.json)


if __name__ == "__main__":
    main()
