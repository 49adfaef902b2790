"""PPO on images: env steps per second of polyak's host loop and of Stable-Baselines3, and the time of one update, in turns.

    python benchmarks/images.py [--quick] [--json PATH]

8 environments x 128 steps of 84x84x4 uint8 images, `NatureCNN`, 4 epochs x 4 minibatches of 256: RL Zoo's settings for Atari.
The environment shows random images, the same in both libraries, and takes little time: an emulator costs both the same.
polyak has two host devices where there are two cores, as `polyak train` takes for images; PyTorch has a thread for each core.

An update of polyak begins with the last value and ends with the KL divergence of the whole batch, which Stable-Baselines3 has
not. The peak is the process's resident memory, with all of its imports and compilation.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Pace, arguments, median, ratios, report, spread, table, take_turns, times, verdict
from peers import python_of

NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES = 8, 128, 4, 4
SAMPLES = NUM_ENVS * NUM_STEPS
SHARED = {"learning_rate": 2.5e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.1, "ent_coef": 0.01, "vf_coef": 0.5}
SHAPE, ACTIONS, EPISODE = (4, 84, 84), 4, 250
TARGET = 1.0
CONTESTANTS = {"loop": "env steps/s", "update": "ms per update"}


def environment() -> Any:
    """Random images, a random reward in each step, and episodes of 250 steps."""
    import gymnasium
    import numpy as np

    class RandomImages(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
        action_space = gymnasium.spaces.Discrete(ACTIONS)

        def __init__(self) -> None:
            rng = np.random.default_rng(0)
            self.images = rng.integers(0, 256, (EPISODE + 1, *SHAPE), np.uint8)
            self.rewards = rng.normal(size=EPISODE + 1)
            self.t = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            self.t = 0
            return self.images[0], {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.t += 1
            return self.images[self.t], float(self.rewards[self.t]), self.t == EPISODE, False, {}

    return RandomImages()


def polyak_worker(task: str, updates: int) -> None:
    import jax

    devices = min(2, len(os.sched_getaffinity(0)))
    jax.config.update("jax_num_cpu_devices", devices)
    import polyak

    env = polyak.envs.make(environment, num_envs=NUM_ENVS)
    agent = polyak.PPO(
        env.spec,
        num_steps=NUM_STEPS,
        num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        max_grad_norm=0.5,
        values_when="collect",
        **SHARED,
    )
    pace = Pace(polyak=polyak.__version__, jax=jax.__version__, devices=devices)
    if task == "loop":
        polyak.loops.host(
            agent,
            env,
            env_steps=10**9,
            key=jax.random.key(0),
            report_every=updates * SAMPLES,
            devices=devices,
            callbacks=[lambda progress, metrics, state: pace.lap(progress.env_steps)],
        )
    repeat(pace, polyak_update(agent, devices), updates)


def polyak_update(agent: Any, devices: int) -> Callable[[], None]:
    """`update` of one rollout of random images, again and again."""
    import jax
    import numpy as np
    from ppo_update import over, places

    from polyak import Rollout, TimeStep

    rng, shape = np.random.default_rng(0), (NUM_STEPS + 1, NUM_ENVS)
    no = np.zeros(shape, bool)
    obs, reward = rng.integers(0, 256, (*shape, *SHAPE), np.uint8), rng.normal(size=shape).astype(np.float32)
    info = {"params": np.zeros((NUM_STEPS, NUM_ENVS, ACTIONS), np.float32), "value": reward[:-1]}
    state = agent.init(jax.random.key(0))
    carry = agent.collect_policy(state).initial_state(NUM_ENVS)
    actions = rng.integers(0, ACTIONS, (NUM_STEPS, NUM_ENVS)).astype(np.int32)
    rollout = Rollout(TimeStep(obs, reward, no, no, no), actions, info, carry)
    update = agent.update if devices == 1 else over(devices, agent, rollout)
    arguments = zip((state, rollout, jax.random.key(1)), places(devices), strict=True)
    state, rollout, key = (jax.device_put(x, place) for x, place in arguments)
    step = jax.jit(update, donate_argnums=0).lower(state, rollout, key).compile()

    def run() -> None:
        nonlocal state
        state, metrics = step(state, rollout, key)
        assert np.isfinite(float(metrics["train/loss"])) and int(metrics["train/skipped_steps"]) == 0

    return run


def sb3_worker(task: str, updates: int) -> None:
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    pace = Pace(stable_baselines3=stable_baselines3.__version__, torch=torch.__version__)
    due = updates * SAMPLES

    class Laps(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if task == "loop" and self.num_timesteps and self.num_timesteps % due == 0:
                pace.lap(self.num_timesteps)

    model = stable_baselines3.PPO(
        "CnnPolicy",
        make_vec_env(environment, n_envs=NUM_ENVS, seed=0),
        n_steps=NUM_STEPS,
        batch_size=SAMPLES // MINIBATCHES,
        n_epochs=EPOCHS,
        max_grad_norm=0.5,
        device="cpu",
        seed=0,
        **SHARED,
    )
    model.learn(10**9 if task == "loop" else SAMPLES, callback=Laps())
    repeat(pace, model.train, updates)


def repeat(pace: Pace, update: Callable[[], None], updates: int) -> None:
    """Updates without end."""
    update()
    done = 0
    while True:
        for _ in range(updates):
            update()
        done += updates
        pace.lap(done)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--worker", choices=["polyak", "sb3"], help="(what the benchmark starts itself with, like the rest)")
    parser.add_argument("--task", choices=[*CONTESTANTS], default="loop")
    parser.add_argument("--updates", type=int, default=2)
    args = parser.parse_args()
    if args.worker:
        (polyak_worker if args.worker == "polyak" else sb3_worker)(args.task, args.updates)
        return
    measured = {task: compare(task, args.quick, args.rounds) for task in CONTESTANTS}
    rows = []
    for task, unit in CONTESTANTS.items():
        rates, against, about = (measured[task][name] for name in ("rates", "ratios", "about"))
        shown = {name: [1000 / rate for rate in its] if task == "update" else its for name, its in rates.items()}
        peak = {name: f"{its['peak_mb']:.0f} MB" for name, its in about.items()}
        rows.append([unit, "Stable-Baselines3", spread(shown["sb3"], "{:.0f}".format), "1", peak["sb3"], ""])
        met = verdict(median(against), TARGET)
        rows.append([unit, "polyak", spread(shown["polyak"], "{:.0f}".format), spread(against, times), peak["polyak"], met])
    text = table(["84x84x4 images, 8 x 128", "", "", "times SB3", "peak memory", "target"], rows)
    report(text, {"benchmark": "images", "quick": args.quick, "target": TARGET, "measured": measured}, args.json)


def compare(task: str, quick: bool, rounds: int) -> dict[str, Any]:
    """Both in turns: env steps, or updates, a second."""
    rest = ["--task", task, "--updates", "1" if quick else "2"]
    pythons = {"sb3": python_of("sb3"), "polyak": sys.executable}
    commands = {name: [python, Path(__file__).resolve(), "--worker", name, *rest] for name, python in pythons.items()}
    rates, about = take_turns(commands, 1 if quick else rounds)
    return {"rates": rates, "ratios": ratios(rates, "polyak", "sb3"), "about": about}


if __name__ == "__main__":
    main()
