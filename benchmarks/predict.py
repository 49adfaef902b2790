"""Microseconds of one `policy.predict(obs)` for one observation, against a bare jitted call and Stable-Baselines3's `predict`.

    python benchmarks/predict.py [--quick] [--json PATH]

Observations of 17 numbers, 6 Box actions, (64, 64) tanh, observations normalized (Stable-Baselines3 does that
outside of `predict`). The bare call is the same policy's mode, jitted, with the whole policy and the observation as arguments
and the answer as a NumPy array: no checks, no clipping to the bounds.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Pace, arguments, ratios, report, spread, table, take_turns, times, verdict
from peers import python_of

OBS, ACTIONS = 17, 6
TARGET = 60.0


def laps(pace: Pace, call: Callable[[Any], Any], obs: Any, count: int) -> None:
    """Call it so often in each turn; some calls before the first are not measured."""
    for _ in range(20):
        call(obs)
    done = 0
    while True:
        pace.lap(done)
        for _ in range(count):
            call(obs)
        done += count


def polyak_worker(count: int, *, bare: bool) -> None:
    import gymnasium
    import jax
    import numpy as np

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import polyak

    env = polyak.envs.make(lambda: bare_env(gymnasium, np), num_envs=1)
    agent = polyak.PPO(spec=env.spec)
    policy = agent.policy(agent.init(jax.random.key(0)))
    obs = np.random.default_rng(0).normal(size=OBS).astype(np.float32)
    pace = Pace(polyak=polyak.__version__, jax=jax.__version__)
    if not bare:
        laps(pace, policy.predict, obs, count)
    no, reward = np.zeros(1, bool), np.zeros(1, np.float32)
    mode = jax.jit(lambda policy, obs: policy.distribution(polyak.TimeStep(obs, reward, no, no, no), ())[0].mode())
    laps(pace, lambda obs: np.asarray(mode(policy, obs))[0], obs[None], count)


def sb3_worker(count: int) -> None:
    import gymnasium
    import numpy as np
    import stable_baselines3
    import torch

    torch.set_num_threads(1)
    pace = Pace(stable_baselines3=stable_baselines3.__version__, torch=torch.__version__)
    model = stable_baselines3.PPO(
        "MlpPolicy", bare_env(gymnasium, np), policy_kwargs={"net_arch": [64, 64]}, device="cpu", seed=0
    )
    obs = np.random.default_rng(0).normal(size=OBS).astype(np.float32)
    laps(pace, lambda obs: model.predict(obs, deterministic=True), obs, count)


def bare_env(gymnasium: Any, np: Any) -> Any:
    """An environment that only has spaces."""

    class Env(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(OBS, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(OBS, np.float32), 0.0, False, False, {}

    return Env()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each")
    parser.add_argument("--worker", choices=["polyak", "bare", "sb3"], help="(what the benchmark starts itself with)")
    parser.add_argument("--count", type=int, default=2000, help="calls in a measurement")
    args = parser.parse_args()
    if args.worker == "sb3":
        sb3_worker(args.count)
    if args.worker:
        polyak_worker(args.count, bare=args.worker == "bare")
    count, rounds = (200, 2) if args.quick else (args.count, args.rounds)
    me = Path(__file__).resolve()
    interpreters = {"sb3": python_of("sb3"), "bare": sys.executable, "polyak": sys.executable}
    commands = {name: [python, me, "--worker", name, "--count", str(count)] for name, python in interpreters.items()}
    rates, about = take_turns(commands, rounds)
    micros = {name: [1e6 / rate for rate in each] for name, each in rates.items()}
    names = {"sb3": "Stable-Baselines3 predict", "bare": "the jitted mode alone", "polyak": "policy.predict"}
    form = lambda x: f"{x:.1f}"  # noqa: E731
    rows = [[names[n], spread(micros[n], form), spread(ratios(rates, n, "sb3"), times), ""] for n in names]
    rows[-1][-1] = verdict(-sorted(micros["polyak"])[rounds // 2], -TARGET).replace(">= -", "<= ")
    text = table(["one observation, (64, 64) tanh", "µs a call", "times SB3", "target"], rows)
    result = {
        "benchmark": "predict",
        "rates": rates,
        "target_us": TARGET,
        "versions": about,
    }
    report(text, {**result, "quick": args.quick, "count": count}, args.json)


if __name__ == "__main__":
    main()
