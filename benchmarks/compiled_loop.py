"""Env steps per second, and learning per step, of polyak's compiled loop and of rejax's PPO on CartPole in JAX, same settings.

    python benchmarks/compiled_loop.py [--quick] [--json PATH] [--num-envs 4 64 512 2048] [--seeds 3]

128 steps, 4 epochs x 4 minibatches, two networks of (64, 64) tanh, value clipping and entropy bonus as rejax has them. Each
goes on training while it is measured, without evaluation; the whole training state is an output of what is compiled, so
nothing is optimized away. polyak counts valid transitions only: a step that resets an environment is none. Compilation and the
first iterations are not counted. polyak runs on one host device and on two (`jax_num_cpu_devices`).

Then both train from fresh seeds for the same number of env steps, and their greedy policies play 128 episodes of at most 500.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, steps, table, take_turns, times, verdict
from peers import python_of

NUM_STEPS, EPOCHS, MINIBATCHES = 128, 4, 4
SHARED = {"learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5}
CLIP = 0.2
EPISODES = 128

# num_envs: env steps of a measurement, and of the comparison of learning; the target.
PLAN = {4: (250_000, 60_000, 1.1), 64: (400_000, 250_000, 1.7), 512: (400_000, 1_000_000, 1.7), 2048: (500_000, 3_000_000, 1.7)}
QUICK = {64: (25_000, 25_000, 1.7)}


def polyak_agent(spec: Any) -> Any:
    import polyak

    return polyak.PPO(
        spec=spec,
        num_steps=NUM_STEPS,
        num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        clip_range=CLIP,
        clip_range_vf=CLIP,
        **SHARED,
    )


def threads_of(num_envs: int, devices: int) -> None:
    """One thread a device where minibatches are small or devices take parts, as `polyak train` does; rejax gets the same."""
    if devices > 1 or num_envs * NUM_STEPS // MINIBATCHES <= 256:
        few_threads(devices)


def polyak_worker(num_envs: int, count: int, devices: int) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    threads_of(num_envs, devices)
    import polyak

    pace = Pace(polyak=polyak.__version__, jax=jax.__version__, devices=devices)
    env = polyak.envs.make("jax/CartPole-v1", num_envs=num_envs)
    polyak.loops.compiled(
        polyak_agent(env.spec),
        env,
        env_steps=10**9,
        key=jax.random.key(0),
        report_every=count,
        devices=devices,
        callbacks=[lambda progress, metrics, state: pace.lap(progress.env_steps)],
    )


def polyak_learning(num_envs: int, count: int, seeds: int) -> list[float]:
    import jax

    import polyak

    env = polyak.envs.make("jax/CartPole-v1", num_envs=num_envs)
    agent = polyak_agent(env.spec)
    judge = polyak.envs.make("jax/CartPole-v1", num_envs=EPISODES)
    returns = []
    for seed in range(seeds):
        result = polyak.loops.compiled(agent, env, env_steps=count, key=jax.random.key(seed))
        policy = agent.policy(result.state)
        returns.append(polyak.train.evaluate(policy, judge, episodes=EPISODES, key=jax.random.key(1000 + seed)).mean_return)
    return returns


def rejax_algorithm(num_envs: int, count: int) -> Any:
    import rejax

    algorithm = rejax.PPO.create(
        env="CartPole-v1",
        num_envs=num_envs,
        num_steps=NUM_STEPS,
        num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        clip_eps=CLIP,
        total_timesteps=count,
        eval_freq=count,
        skip_initial_evaluation=True,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        **SHARED,
    )
    return algorithm.replace(eval_callback=lambda algorithm, state, key: ())


def rejax_worker(num_envs: int, count: int) -> None:
    import jax

    threads_of(num_envs, 1)
    pace = Pace(jax=jax.__version__)
    algorithm = rejax_algorithm(num_envs, count)
    rollout = num_envs * NUM_STEPS
    count = -(-count // rollout) * rollout

    def train(state: Any) -> Any:
        return algorithm.train(train_state=state)[0]

    state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(0))
    compiled = jax.jit(train, donate_argnums=0).lower(state).compile()
    done = 0
    while True:
        state = jax.block_until_ready(compiled(state))
        done += count
        pace.lap(done)


def rejax_learning(num_envs: int, count: int, seeds: int) -> list[float]:
    import jax
    from rejax.evaluate import evaluate

    algorithm = rejax_algorithm(num_envs, count)
    train = jax.jit(algorithm.train)
    returns = []
    for seed in range(seeds):
        params = train(jax.random.PRNGKey(seed))[0].actor_ts.params

        def greedy(obs: Any, key: Any, params: Any = params) -> Any:
            return algorithm.actor.apply(params, obs[None], method="_action_dist").mode()[0]

        _, played = evaluate(greedy, jax.random.PRNGKey(1000 + seed), algorithm.env, algorithm.env_params, EPISODES, 500)
        returns.append(float(played.mean()))
    return returns


def main() -> None:
    args = parsed()
    if args.worker:
        work(args)
        return
    plan = QUICK if args.quick else {n: PLAN[n] for n in args.num_envs}
    rounds, seeds = (2, 1) if args.quick else (args.rounds, args.seeds)
    measured = {num_envs: compare(num_envs, *plan[num_envs], rounds, seeds) for num_envs in plan}
    header = ["num_envs", "contestant", "env steps/s", "times rejax", "target", "learned in", "mean greedy return"]
    rows = [row for num_envs in plan for row in rows_of(num_envs, measured[num_envs], plan[num_envs])]
    report(table(header, rows), {"benchmark": "compiled_loop", "quick": args.quick, "by_num_envs": measured}, args.json)


def compare(num_envs: int, count: int, learn_count: int, target: float, rounds: int, seeds: int) -> dict[str, Any]:
    """All figures for one number of environments."""
    me, rejax = Path(__file__).resolve(), python_of("rejax")
    size = ["--envs", str(num_envs)]
    commands = {
        "rejax": [rejax, me, *size, "--worker", "rejax", "--count", str(count)],
        "polyak, 1 device": [sys.executable, me, *size, "--worker", "polyak", "--count", str(count)],
        "polyak, 2 devices": [sys.executable, me, *size, "--worker", "polyak", "--count", str(count), "--devices", "2"],
    }
    rates, about = take_turns(commands, rounds)

    def learn(peer: str, python: str | Path) -> list[float]:
        command = [python, me, *size, "--worker", f"{peer}-learning", "--count", str(learn_count), "--seeds", str(seeds)]
        said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        returns: list[float] = json.loads(said.splitlines()[-1])
        return returns

    # Not timed, so both at once.
    with ThreadPoolExecutor(2) as pool:
        theirs, ours = pool.map(learn, ("rejax", "polyak"), (rejax, sys.executable))
    learning = {"rejax": theirs, "polyak, 1 device": ours}
    versus = {name: ratios(rates, name, "rejax") for name in rates if name != "rejax"}
    return {"rates": rates, "ratios": versus, "target": target, "learning": learning, "versions": about}


def rows_of(num_envs: int, measured: dict[str, Any], plan: tuple[int, int, float]) -> list[list[str]]:
    """The table's lines for one number of environments; the target is the better polyak's."""
    best = max(measured["ratios"], key=lambda name: median(measured["ratios"][name]))
    rows = []
    for name, rates in measured["rates"].items():
        ratio = measured["ratios"].get(name)
        returns = measured["learning"].get(name, [])
        rows.append([
            str(num_envs),
            name,
            spread(rates, steps),
            "1" if ratio is None else spread(ratio, times),
            verdict(median(ratio), plan[2]) if ratio is not None and name == best else "",
            f"{plan[1]:,} env steps" if returns else "",
            f"{sum(returns) / len(returns):.0f} ({', '.join(f'{r:.0f}' for r in returns)})" if returns else "",
        ])  # fmt: skip
    return rows


def work(args: argparse.Namespace) -> None:
    """One contestant's share."""
    match args.worker:
        case "polyak":
            polyak_worker(args.envs, args.count, args.devices)
        case "rejax":
            rejax_worker(args.envs, args.count)
        case "polyak-learning":
            print(json.dumps(polyak_learning(args.envs, args.count, args.seeds)))
        case "rejax-learning":
            print(json.dumps(rejax_learning(args.envs, args.count, args.seeds)))


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--num-envs", type=int, nargs="+", choices=list(PLAN), default=list(PLAN), help="sizes to measure")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each for the comparison of learning")
    parser.add_argument(
        "--worker",
        choices=["polyak", "rejax", "polyak-learning", "rejax-learning"],
        help="(what the benchmark starts itself with, like the rest)",
    )
    parser.add_argument("--envs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
