"""Time of one PPO update alone: polyak's jitted `update` and Stable-Baselines3's `train()`, on the same synthetic rollout.

    python benchmarks/ppo_update.py [--quick] [--json PATH]

8 environments x 256 steps, obs of 17 numbers, Box actions of 6 (the shape of HalfCheetah), two networks of (64, 64) tanh; 10
epochs x 32 minibatches, and 10 epochs over the full batch. polyak's time includes the values, log-probabilities and advantages
of the rollout, which Stable-Baselines3 computes while it collects and are not in its time. polyak's state is donated, as in its
loops.
"""

import sys
from pathlib import Path
from typing import Any

from harness import Pace, arguments, median, ratios, report, spread, table, take_turns, times, verdict
from peers import python_of

NUM_ENVS, NUM_STEPS, OBS, ACTIONS, EPOCHS = 8, 256, 17, 6, 10
SHARED = {"learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5}
MAX_MS, TARGET = 36.0, 13.0


def synthetic() -> dict[str, Any]:
    """A rollout of noise: `[T+1, B]` observations, and `[T, B]` of the rest; some episodes end."""
    import numpy as np

    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(NUM_STEPS + 1, NUM_ENVS, OBS)).astype(np.float32),
        "actions": rng.normal(size=(NUM_STEPS, NUM_ENVS, ACTIONS)).astype(np.float32),
        "reward": rng.normal(size=(NUM_STEPS, NUM_ENVS)).astype(np.float32),
        "terminated": rng.random((NUM_STEPS, NUM_ENVS)) < 0.01,
    }


def polyak_worker(minibatches: int, updates: int) -> None:
    import jax
    import numpy as np

    import polyak
    from polyak import Rollout, TimeStep

    pace = Pace(polyak=polyak.__version__, jax=jax.__version__)
    data = synthetic()
    spec = polyak.envs.make(environment).spec
    agent = polyak.PPO(
        spec=spec, num_steps=NUM_STEPS, num_epochs=EPOCHS, num_minibatches=minibatches, max_grad_norm=0.5, **SHARED
    )

    def since_reset(x: Any) -> Any:
        return np.concatenate([np.zeros((1, NUM_ENVS), x.dtype), x])

    terminated = since_reset(data["terminated"])
    first = np.concatenate([np.ones((1, NUM_ENVS), bool), terminated[:-1]])
    time_steps = TimeStep(data["obs"], since_reset(data["reward"]), terminated, np.zeros_like(terminated), first)
    rollout = jax.device_put(Rollout(time_steps, data["actions"]))
    state = agent.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), updates)
    update = jax.jit(agent.update, donate_argnums=0).lower(state, rollout, keys[0]).compile()
    done = 0
    while True:
        for key in keys:
            state, metrics = update(state, rollout, key)
            assert np.isfinite(metrics["train/loss"])
        jax.block_until_ready(state)
        done += updates
        pace.lap(done)


def sb3_worker(minibatches: int, updates: int) -> None:
    import stable_baselines3
    import torch
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv

    # One thread is faster than two on networks this small, so it gets one.
    torch.set_num_threads(1)
    pace = Pace(stable_baselines3=stable_baselines3.__version__, torch=torch.__version__)
    model = stable_baselines3.PPO(
        "MlpPolicy",
        DummyVecEnv([environment] * NUM_ENVS),
        n_steps=NUM_STEPS,
        batch_size=NUM_ENVS * NUM_STEPS // minibatches,
        n_epochs=EPOCHS,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": [64, 64]},
        device="cpu",
        seed=0,
        **SHARED,
    )
    model.set_logger(Logger(None, []))
    fill(model)
    done = 0
    while True:
        for _ in range(updates):
            model.train()
        done += updates
        pace.lap(done)


def fill(model: Any) -> None:
    """Put the synthetic rollout into Stable-Baselines3's buffer, as its `collect_rollouts` does."""
    import numpy as np
    import torch

    data = synthetic()
    starts = np.ones(NUM_ENVS, np.float32)
    with torch.no_grad():
        for t in range(NUM_STEPS):
            obs, actions = data["obs"][t], data["actions"][t]
            values, log_probs, _ = model.policy.evaluate_actions(torch.as_tensor(obs), torch.as_tensor(actions))
            model.rollout_buffer.add(obs, actions, data["reward"][t], starts, values, log_probs)
            starts = data["terminated"][t].astype(np.float32)
        last_values = model.policy.predict_values(torch.as_tensor(data["obs"][-1]))
    model.rollout_buffer.compute_returns_and_advantage(last_values, dones=starts)


def environment() -> Any:
    """A Gymnasium environment of those shapes in which nothing happens."""
    import gymnasium as gym
    import numpy as np

    unbounded = np.full(OBS, np.inf, np.float32)

    class Still(gym.Env):  # type: ignore[misc]
        observation_space = gym.spaces.Box(-unbounded, unbounded)
        action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return np.zeros(OBS, np.float32), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return np.zeros(OBS, np.float32), 0.0, False, False, {}

    return Still()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--worker", choices=["polyak", "sb3"], help="(what the benchmark starts itself with, like the rest)")
    parser.add_argument("--minibatches", type=int, default=32)
    parser.add_argument("--updates", type=int, default=1)
    args = parser.parse_args()
    if args.worker:
        (polyak_worker if args.worker == "polyak" else sb3_worker)(args.minibatches, args.updates)
        return

    measured = {minibatches: compare(minibatches, args.quick, args.rounds) for minibatches in (32, 1)}
    rows = [row for minibatches in measured for row in rows_of(minibatches, measured[minibatches])]
    text = table(["10 epochs x", "contestant", "ms per update", "times SB3", "target"], rows)
    report(text, {"benchmark": "ppo_update", "quick": args.quick, "by_minibatches": measured}, args.json)


def compare(minibatches: int, quick: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds per update of both, in turns."""
    me, sb3 = Path(__file__).resolve(), python_of("sb3")
    size = ["--minibatches", str(minibatches), "--updates"]
    commands = {
        "sb3": [sb3, me, "--worker", "sb3", *size, "1" if quick else "4"],
        "polyak": [sys.executable, me, "--worker", "polyak", *size, "5" if quick else "40"],
    }
    rates, about = take_turns(commands, 2 if quick else rounds)
    ms = {name: [1000 / rate for rate in its] for name, its in rates.items()}
    return {"ms": ms, "ratios": ratios(rates, "polyak", "sb3"), "versions": about}


def rows_of(minibatches: int, measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one number of minibatches; the targets are for 32."""
    ms, ratio = measured["ms"], measured["ratios"]
    name = f"{minibatches} minibatches" if minibatches > 1 else "the full batch"
    fast = "yes" if median(ms["polyak"]) <= MAX_MS else "NO"
    target = f"{fast} (<= {MAX_MS:g} ms), {verdict(median(ratio), TARGET)}" if minibatches == 32 else ""
    return [
        [name, "Stable-Baselines3", spread(ms["sb3"], "{:.0f}".format), "1", ""],
        [name, "polyak, jitted", spread(ms["polyak"], "{:.1f}".format), spread(ratio, times), target],
    ]


if __name__ == "__main__":
    main()
