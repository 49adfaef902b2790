"""Env steps per second of polyak's host loop and of Stable-Baselines3's PPO in Gymnasium, same settings.

    python benchmarks/host_loop.py [--quick] [--json PATH] [--env CartPole-v1]

8 environments x 128 steps, 4 epochs x 4 minibatches, two networks of (64, 64) tanh. Both train: rollout, update, counts. polyak
counts valid transitions only: a step that resets an environment is none. Compilation and the first iterations are not counted.
"""

import sys
from pathlib import Path

from harness import Pace, arguments, few_threads, ratios, report, spread, steps, table, take_turns, times, verdict
from peers import python_of

NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES = 8, 128, 4, 4
SHARED = {"learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5}
TARGET = 4.0


def polyak_worker(count: int, name: str) -> None:
    import jax

    # As the command line does for this loop: waking another thread costs more than 20 µs of work, or a product of 256 rows.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    few_threads(1)
    import polyak

    pace = Pace(polyak=polyak.__version__, jax=jax.__version__)
    env = polyak.envs.make(name, num_envs=NUM_ENVS)
    agent = polyak.PPO(
        spec=env.spec, num_steps=NUM_STEPS, num_epochs=EPOCHS, num_minibatches=MINIBATCHES, max_grad_norm=0.5, **SHARED
    )
    polyak.loops.host(
        agent,
        env,
        env_steps=10**9,
        key=jax.random.key(0),
        report_every=count,
        callbacks=[lambda progress, metrics, state: pace.lap(progress.env_steps)],
    )


def sb3_worker(count: int, name: str) -> None:
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    # One thread is faster than two on networks this small, so it gets one.
    torch.set_num_threads(1)
    pace = Pace(stable_baselines3=stable_baselines3.__version__, torch=torch.__version__)

    class Laps(BaseCallback):
        due = count

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps >= self.due:
                pace.lap(self.num_timesteps)
                self.due = self.num_timesteps + count

    model = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env(name, n_envs=NUM_ENVS, seed=0),
        n_steps=NUM_STEPS,
        batch_size=NUM_ENVS * NUM_STEPS // MINIBATCHES,
        n_epochs=EPOCHS,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": [64, 64]},
        device="cpu",
        seed=0,
        **SHARED,
    )
    model.learn(10**9, callback=Laps())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--env", default="CartPole-v1", help="a name of Gymnasium, such as HalfCheetah-v5")
    parser.add_argument("--worker", choices=["polyak", "sb3"], help="(what the benchmark starts itself with)")
    parser.add_argument("--count", type=int, default=32 * NUM_ENVS * NUM_STEPS, help="env steps in a measurement")
    args = parser.parse_args()
    if args.worker:
        (polyak_worker if args.worker == "polyak" else sb3_worker)(args.count, args.env)
        return

    count, rounds = (4 * NUM_ENVS * NUM_STEPS, 2) if args.quick else (args.count, args.rounds)
    me = Path(__file__).resolve()
    interpreters = {"sb3": python_of("sb3"), "polyak": sys.executable}
    commands = {
        name: [python, me, "--worker", name, "--env", args.env, "--count", str(count)] for name, python in interpreters.items()
    }
    rates, about = take_turns(commands, rounds)
    times_sb3 = ratios(rates, "polyak", "sb3")
    ratio = sorted(times_sb3)[len(times_sb3) // 2]
    rows = [
        ["Stable-Baselines3", spread(rates["sb3"], steps), "1", ""],
        ["polyak.loops.host", spread(rates["polyak"], steps), spread(times_sb3, times), verdict(ratio, TARGET)],
    ]
    text = table([f"{args.env}, 8 x 128", "env steps/s", "times SB3", "target"], rows)
    result = {
        "benchmark": "host_loop",
        "env": args.env,
        "rates": rates,
        "ratios": times_sb3,
        "target": TARGET,
        "versions": about,
    }
    report(text, {**result, "quick": args.quick, "count": count}, args.json)


if __name__ == "__main__":
    main()
