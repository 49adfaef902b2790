"""Run directories written by the storage alone, without a training."""

import numpy as np

from polyak.storage.run_directory import create

AGENT = {"$class": "PPO", "spec": {"$class": "EnvSpec"}, "gamma": 0.99, "network": {"$class": "MLP", "hidden": [64, 64]}}


def write_run(path, rows=(), *, summary=True, stopped=None, agent=None, **config):
    """Write a run directory; `agent` holds changed settings of the agent, and `summary=False` leaves the run killed."""
    rows = list(rows)
    last = rows[-1]["env_steps"] if rows else 0
    settings = {"algorithm": "ppo", "env": "jax/CartPole-v1", "seed": 0, "env_steps": last, "num_envs": 8, "threads": None}
    with create(path, settings | config | {"agent": AGENT | (agent or {})}) as run:
        for row in rows:
            run.append_metrics(row)
        if summary:
            run.write_summary({"env_steps": last, "eval_mean_return": 1.5, "eval_episodes": 2, "stopped": stopped})
    return path


def linear_rows(count, *, slope=1.0, start=0.0, step=100, every=None, seconds=0.5):
    """Rows with returns on a line; each `every` rows with an evaluation."""
    for n in range(1, count + 1):
        row = {"env_steps": n * step, "time/time_elapsed": n * seconds, "rollout/ep_rew_mean": start + slope * n}
        if every and n % every == 0:
            row["eval/mean_reward"] = 1000.0 + n
        yield row | {"train/loss": float(np.sin(n))}
