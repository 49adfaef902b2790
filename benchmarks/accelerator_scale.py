"""Thousands of environments on an accelerator: env steps per second of whole trainings, and the time's parts.

    python benchmarks/accelerator_scale.py [--json PATH] [--seconds 480] [--tasks cartpole ...] [--num-envs 2048 8192 32768]

Each task runs in a process of its own, one after another, and reports once; a task that would begin after `--seconds` is left
out. `--quick` shows on a CPU that all tasks run. Tasks with environments run for each number of environments:

- `cartpole`, `cheetah`: PPO in jax/CartPole-v1 and in MuJoCo Playground's CheetahRun (its extra, and its default physics where
  JAX has a GPU), with rollouts of 32 steps. `step` is the time of a rollout of random actions, `act` what the policy adds,
  `learn` the rest of an iteration.
- `brax`: Brax' PPO in CheetahRun with the same rollouts, minibatches and epochs.
- `dqn`, `sac`: 256 CartPoles and Pendulums, a replay of a million steps on the device, a gradient step for every 64 env steps.
- `seeds`: 64 trainings of PPO with 64 CartPoles each in one program; steps of all.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import arguments, report, table

NUM_STEPS, EPOCHS, MINIBATCHES, ITERATIONS = 32, 4, 8, 20
SEEDS, ENVS_PER_SEED = 64, 64
SIZED, OTHERS = ("cartpole", "cheetah", "brax"), ("dqn", "sac", "seeds")
NAMES = {"cartpole": "jax/CartPole-v1", "cheetah": "playground/CheetahRun"}


def ppo(spec: Any, hidden: tuple[int, ...] = (64, 64)) -> Any:
    """The agent of all tasks of PPO."""
    import polyak

    return polyak.PPO(
        spec=spec,
        network=polyak.MLP(hidden),
        num_steps=NUM_STEPS,
        num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        learning_rate=1e-3,
        normalize_obs=True,
    )


def learn_on_policy(task: str, num_envs: int) -> dict[str, Any]:
    """Env steps per second, and seconds of an iteration by part."""
    import jax

    import polyak

    env: Any = polyak.envs.make(NAMES[task], num_envs=num_envs)
    agent = ppo(env.spec)
    result = polyak.loops.compiled(agent, env, env_steps=ITERATIONS * NUM_STEPS * num_envs, key=jax.random.key(0))
    iteration = result.progress.seconds / result.progress.iteration
    step = rollout_seconds(polyak.policies.Uniform(env.spec), env)
    collect = rollout_seconds(agent.collect_policy(result.state), env)
    return {
        **rate_of(result),
        "step": step / iteration,
        "act": (collect - step) / iteration,
        "learn": 1 - collect / iteration,
    }


def rollout_seconds(policy: Any, env: Any) -> float:
    """Seconds to collect a rollout, without its resets at the start: the difference to a rollout of one step."""
    import jax

    import polyak

    def seconds(num_steps: int) -> float:
        def run() -> None:
            jax.block_until_ready(polyak.train.collect(policy, env, num_steps, key=jax.random.key(0)))

        run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds(NUM_STEPS + 1) - seconds(1)


def learn_off_policy(task: str) -> dict[str, Any]:
    """Env steps per second."""
    import jax

    import polyak

    name = "jax/CartPole-v1" if task == "dqn" else "jax/Pendulum-v1"
    env: Any = polyak.envs.make(name, num_envs=256, action_scaling="rescale")
    kind: Any = polyak.DQN if task == "dqn" else polyak.SAC
    agent = kind(
        env.spec,
        num_steps=4,
        updates_per_step=1 / 64,
        batch_size=256,
        replay=polyak.UniformReplay(1_000_000),
        learning_starts=10_000,
    )
    return rate_of(polyak.loops.compiled(agent, env, env_steps=200 * 4 * 256, key=jax.random.key(0)))


def learn_seeds(_: str) -> dict[str, Any]:
    """Env steps per second of all seeds."""
    import jax

    import polyak

    env: Any = polyak.envs.make("jax/CartPole-v1", num_envs=ENVS_PER_SEED)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    env_steps = ITERATIONS * NUM_STEPS * ENVS_PER_SEED
    results = polyak.loops.compiled_seeds(ppo(env.spec), env, env_steps=env_steps, keys=keys)
    return rate_of(results[0]) | {"rate": sum(result.progress.env_steps for result in results) / results[0].progress.seconds}


def rate_of(result: Any) -> dict[str, Any]:
    """Env steps per second, and seconds to compile."""
    return {"rate": result.progress.fps, "compile_seconds": result.progress.compile_seconds}


def learn_in_brax(_: str, num_envs: int) -> dict[str, Any]:
    """Env steps per second of Brax' PPO."""
    import playground

    times: list[float] = []
    playground.NUM_ENVS, playground.UNROLL = num_envs, NUM_STEPS
    playground.BATCH, playground.MINIBATCHES, playground.EPOCHS = num_envs // MINIBATCHES, MINIBATCHES, EPOCHS
    playground.brax_train(
        "CheetahRun",
        num_timesteps=4 * ITERATIONS * NUM_STEPS * num_envs,
        num_evals=5,
        run_evals=False,
        progress_fn=lambda *_: times.append(time.perf_counter()),
    )
    # It compiles between the first report and the third.
    seconds = min(b - a for a, b in itertools.pairwise(times[2:]))
    return {"rate": ITERATIONS * NUM_STEPS * num_envs / seconds, "compile_seconds": times[2] - times[0] - 2 * seconds}


def work(task: str, num_envs: int) -> None:
    """Run a task, and print its figures as JSON."""
    # The policy and the physics share the memory of the device; each task has it alone.
    import jax

    sized: dict[str, Callable[[str, int], dict[str, Any]]]
    sized = {"cartpole": learn_on_policy, "cheetah": learn_on_policy, "brax": learn_in_brax}
    others: dict[str, Callable[[str], dict[str, Any]]]
    others = {"dqn": learn_off_policy, "sac": learn_off_policy, "seeds": learn_seeds}
    found = sized[task](task, num_envs) if task in sized else others[task](task)
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    found |= {"device": device.device_kind, "peak_gb": memory.get("peak_bytes_in_use", 0) / 1e9}
    print(json.dumps(found))


def run(task: str, num_envs: int, seconds: float) -> dict[str, Any]:
    """The figures of a task in a process of its own; or the reason why there are none."""
    words = [sys.executable, Path(__file__).resolve(), "--task", task, "--num-envs", str(num_envs)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(task: str, num_envs: int | None, found: dict[str, Any]) -> list[str]:
    """The table's line of a task."""
    name = [task, f"{num_envs:,}" if num_envs else ""]
    if "error" in found:
        return [*name, found["error"], "", "", "", "", ""]
    parts = [f"{found[part]:.0%}" if part in found else "" for part in ("step", "act", "learn")]
    return [*name, f"{found['rate']:,.0f}", *parts, f"{found['compile_seconds']:.0f} s", f"{found['peak_gb']:.1f} GB"]


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tasks", nargs="+", choices=SIZED + OTHERS, default=list(SIZED + OTHERS), help="tasks to run")
    parser.add_argument("--num-envs", nargs="+", type=int, default=[2048, 8192, 32768], help="environments")
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit of all tasks")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.task:
        work(args.task, args.num_envs[0])
        return
    sizes = [256] if args.quick else args.num_envs
    end = time.monotonic() + args.seconds
    plan = [(task, size) for size in sizes for task in SIZED if task in args.tasks]
    plan[len(SIZED) : len(SIZED)] = [(task, None) for task in OTHERS if task in args.tasks]
    found = {}
    for task, size in plan:
        left = end - time.monotonic()
        found[task, size] = run(task, size or 1, left) if left > 0 else {"error": "no time left"}
    header = ["task", "environments", "env steps/s", "step", "act", "learn", "compile", "peak memory"]
    rows = [row_of(task, size, each) for (task, size), each in found.items()]
    tasks = [{"task": task, "num_envs": size, **each} for (task, size), each in found.items()]
    result = {"benchmark": "accelerator_scale", "quick": args.quick, "tasks": tasks, "cpus": os.cpu_count()}
    report(table(header, rows), result, args.json)


if __name__ == "__main__":
    main()
