"""Time of one PPO update alone: polyak, TF-Agents and Stable-Baselines3 on the same synthetic rollout, taking turns.

    python benchmarks/ppo_update.py [--quick] [--json PATH]

8 environments x 256 steps, obs of 17 numbers, Box actions of 6 (the shape of HalfCheetah), two networks of (64, 64) tanh; 10
epochs x 32 minibatches, and 10 epochs over the full batch.

polyak             `update`, jitted, its state donated, as in its loops; values, log-probabilities and advantages are in its
                   time
polyak, 2 devices  the same inside `jax.shard_map`, over two host devices, each with half of the environments
polyak, all on     with KL penalty and cutoff, L2, value clipping, entropy, both normalisations and clipped log-probabilities
TF-Agents          `PPOClipAgent.train` in a `tf.function`: once for 10 full-batch epochs, with values and advantages; for
                   minibatches 320 calls looped in one function, after `preprocess_sequence`, but with values given
PPOLearner         TF-Agents' trainer on minibatches; it reads a `tf.data.Dataset` of the one rollout, here without Reverb
..., one thread    these two with `tf.config.threading` at one thread, which is faster for minibatches; its users have to know
Stable-Baselines3  `train()`, without values, log-probabilities and advantages, which it computes while it collects

polyak's update of minibatches, and that on two devices, has one thread a device (`PJRT_NPROC`), as `polyak train` starts JAX.
Ratios are of turns; alone is without another process on the machine. Compilation and memory are of polyak's update. The
peak is what XLA plans: arguments, results that do not take an argument's place, and temporaries.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, table, take_turns, times, verdict
from peers import python_if_possible, python_of
from ppo_peers import EPOCHS, NUM_ENVS, NUM_STEPS, SHARED, environment, sb3_worker, synthetic, tf_agents_worker

ALL_ON = {
    "ent_coef": 0.01,
    "clip_range_vf": 0.2,
    "clip_log_prob": 20.0,
    "clip_range": 0.2,
    "kl_cutoff_coef": 1000.0,
    "l2_policy": 1e-4,
    "l2_value": 1e-4,
    "normalize_obs": True,
    "normalize_reward": "return",
}
CONTESTANTS = {
    "sb3": "Stable-Baselines3",
    "tf_agents": "TF-Agents",
    "learner": "TF-Agents' PPOLearner",
    "tf_agents-1": "TF-Agents, one thread",
    "learner-1": "TF-Agents' PPOLearner, one thread",
    "polyak": "polyak",
    "polyak-2": "polyak, 2 devices",
    "polyak-all": "polyak, all on",
}
PEERS = ("sb3", "tf_agents", "learner", "tf_agents-1", "learner-1")
# By number of minibatches: how many times as fast as a peer, and milliseconds.
TARGETS = {32: {"sb3": 13.0, "tf_agents": 4.0, "learner": 6.0}, 1: {"tf_agents": 1.8}}
MAX_MS = {32: 36.0, 1: 14.0}
MOST_FOR_ALL, MAX_COMPILE = 1.5, 3.0
# Steps, environments, and rows whose gradient is computed at a time: what fits the cache weighs more than a small rollout.
MEMORY = ((NUM_STEPS, NUM_ENVS, None), (NUM_STEPS, NUM_ENVS, 64), (1024, 128, None))


def polyak_agent(minibatches: int, settings: dict[str, Any]) -> Any:
    import polyak

    spec = polyak.envs.make(environment).spec
    fixed = {"num_steps": NUM_STEPS, "num_epochs": EPOCHS, "num_minibatches": minibatches, "max_grad_norm": 0.5}
    kind = polyak.PPOKL if "l2_policy" in settings else polyak.PPO
    return kind(spec=spec, **{**fixed, **SHARED, **settings})


def polyak_rollout(agent: Any, state: Any, num_steps: int = NUM_STEPS, num_envs: int = NUM_ENVS) -> Any:
    import jax
    import numpy as np

    from polyak import Rollout, TimeStep

    data = synthetic(num_steps, num_envs)
    no = np.zeros_like(data["terminated"])
    time_steps = TimeStep(data["obs"], data["reward"], data["terminated"], no, data["first"])
    carry = agent.collect_policy(state).initial_state(num_envs)
    return jax.device_put(Rollout(time_steps, data["actions"], (), carry))


def polyak_worker(contestant: str, minibatches: int, updates: int) -> None:
    import jax
    import numpy as np

    devices = 2 if contestant == "polyak-2" else 1
    if devices > 1 or minibatches > 1:
        # As the command line does: waking another thread costs more than a product of 64 rows.
        few_threads(devices)
    jax.config.update("jax_num_cpu_devices", devices)
    import polyak

    agent = polyak_agent(minibatches, ALL_ON if contestant == "polyak-all" else {})
    state = agent.init(jax.random.key(0))
    rollout = polyak_rollout(agent, state)
    keys = jax.random.split(jax.random.key(1), updates)
    update = agent.update if devices == 1 else over(devices, agent, rollout)
    state, rollout, keys = (jax.device_put(x, place) for x, place in zip((state, rollout, keys), places(devices), strict=True))
    step = jax.jit(update, donate_argnums=0).lower(state, rollout, keys[0]).compile()
    pace = Pace(polyak=polyak.__version__, jax=jax.__version__)
    done = 0
    while True:
        for key in keys:
            state, metrics = step(state, rollout, key)
            assert np.isfinite(metrics["train/loss"]) and int(metrics["train/skipped_steps"]) == 0
        jax.block_until_ready(state)
        done += updates
        pace.lap(done)


def over(devices: int, agent: Any, rollout: Any) -> Callable[..., Any]:
    """The update with the environments split over devices."""
    import jax
    from jax.sharding import PartitionSpec as P

    by_env = jax.tree.map(lambda _: P(None, "envs"), rollout)
    update = lambda state, rollout, key: agent.update(state, rollout, key, axis_name="envs")  # noqa: E731
    mesh = jax.make_mesh((devices,), ("envs",), (jax.sharding.AxisType.Auto,))
    return jax.shard_map(update, mesh=mesh, in_specs=(P(), by_env, P()), out_specs=P(), check_vma=False)


def places(devices: int) -> tuple[Any, Any, Any]:
    """Where state, rollout and keys lie."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    if devices == 1:
        return None, None, None
    mesh = jax.make_mesh((devices,), ("envs",), (jax.sharding.AxisType.Auto,))
    return NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "envs")), NamedSharding(mesh, P())


def compiler_worker() -> None:
    """How long an update compiles, and the memory that XLA plans for full-batch ones, as the worker's words about itself."""
    import jax

    seconds, found = {}, []
    for name, minibatches, settings in (("plain", 32, {}), ("all on", 32, ALL_ON), ("plain", 1, {}), ("all on", 1, ALL_ON)):
        agent = polyak_agent(minibatches, settings)
        state = agent.init(jax.random.key(0))
        rollout = polyak_rollout(agent, state)
        start = time.perf_counter()
        jax.jit(agent.update, donate_argnums=0).lower(state, rollout, jax.random.key(1)).compile()
        seconds[f"{name}, {title_of(minibatches)}"] = time.perf_counter() - start
    for num_steps, num_envs, microbatch_size in MEMORY:
        agent = polyak_agent(1, {"num_steps": num_steps, "microbatch_size": microbatch_size})
        state = agent.init(jax.random.key(0))
        rollout = polyak_rollout(agent, state, num_steps, num_envs)
        step = jax.jit(agent.update, donate_argnums=0).lower(state, rollout, jax.random.key(1)).compile()
        plan = step.memory_analysis()
        data, params = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (rollout, state.copies.online.params))
        peak = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
        parts = "" if microbatch_size is None else f" in microbatches of {microbatch_size}"
        found.append({"shape": f"{num_envs} x {num_steps}{parts}", "peak": peak, "rollout": data, "params": params})
    pace = Pace(compile_seconds=seconds, memory=found)
    while True:
        pace.lap(0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--worker", choices=[*CONTESTANTS, "compiler"], help="(what it starts itself with, like the rest)")
    parser.add_argument("--minibatches", type=int, default=32)
    parser.add_argument("--updates", type=int, default=1)
    args = parser.parse_args()
    match args.worker:
        case None:
            compare_all(args.quick, args.rounds, args.json)
        case "compiler":
            compiler_worker()
        case "sb3":
            sb3_worker(args.minibatches, args.updates)
        case "tf_agents" | "tf_agents-1" | "learner" | "learner-1":
            peer, _, one_thread = args.worker.partition("-")
            tf_agents_worker(args.minibatches, args.updates, learner=peer == "learner", one_thread=bool(one_thread))
        case _:
            polyak_worker(args.worker, args.minibatches, args.updates)


def compare_all(quick: bool, rounds: int, json_path: Path | None) -> None:
    """Measure and report."""
    measured = {minibatches: compare(minibatches, quick, rounds) for minibatches in (32, 1)}
    header = ["10 epochs x", "contestant", "ms per update", "ms alone", "times SB3", "times TF-Agents", "times PPOLearner"]
    rows = [row for minibatches in measured for row in rows_of(measured[minibatches])]
    wanted = [line for minibatches in measured for line in verdicts(minibatches, measured[minibatches])]
    # Alone: compilers that run at the same time share the cores.
    _, about = take_turns({"compiler": [sys.executable, Path(__file__).resolve(), "--worker", "compiler"]}, 0)
    found = about["compiler"]
    for name, seconds in found["compile_seconds"].items():
        wanted.append(f"{name}: compiled in {seconds:.1f} s: {at_most(seconds, MAX_COMPILE)}")
    wanted += [memory_line(plan) for plan in found["memory"]]
    text = table(header, rows) + "\n\n" + "\n".join(f"- {line}" for line in wanted)
    report(text, {"benchmark": "ppo_update", "quick": quick, "by_minibatches": measured, "compiler": found}, json_path)


def compare(minibatches: int, quick: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds per update of all, in turns."""
    me = Path(__file__).resolve()
    pythons = {"sb3": python_of("sb3"), "tf_agents": python_if_possible("tf_agents")}
    pythons |= dict.fromkeys(("learner", "tf_agents-1", "learner-1"), pythons["tf_agents"] if minibatches > 1 else None)
    calls = {"sb3": 4, "tf_agents": 8 if minibatches > 1 else 40, "learner": 4, "tf_agents-1": 8, "learner-1": 4}
    commands = {}
    for name in CONTESTANTS:
        python = pythons.get(name, Path(sys.executable))
        if python is not None:
            updates = 1 if quick else calls.get(name, 40)
            commands[name] = [python, me, "--worker", name, "--minibatches", str(minibatches), "--updates", str(updates)]
    rates, about = take_turns(commands, 2 if quick else rounds)
    # While six other processes keep their data in the caches, everybody is slower.
    alone = {name: take_turns({name: commands[name]}, 2 if quick else rounds)[0][name] for name in ("polyak", "polyak-2")}
    peers = [name for name in PEERS if name in rates]
    return {
        "minibatches": minibatches,
        "ms": {name: [1000 / rate for rate in its] for name, its in rates.items()},
        "ms_alone": {name: [1000 / rate for rate in its] for name, its in alone.items()},
        "ratios": {name: {peer: ratios(rates, name, peer) for peer in peers} for name in rates},
        "slower": ratios(rates, "polyak", "polyak-all"),
        "about": about,
    }


def rows_of(measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one number of minibatches."""
    title, rows = title_of(measured["minibatches"]), []
    for name, ms in measured["ms"].items():
        against = measured["ratios"][name]
        compared = [spread(against[peer], times) if peer in against else "" for peer in ("sb3", "tf_agents", "learner")]
        alone = measured["ms_alone"].get(name)
        alone = "" if alone is None else spread(alone, "{:.1f}".format)
        rows.append([title, CONTESTANTS[name], spread(ms, "{:.1f}".format), alone, *compared])
    return rows


def verdicts(minibatches: int, measured: dict[str, Any]) -> list[str]:
    """What was wanted of one number of minibatches; polyak is the faster of its one and two devices."""
    best = min(("polyak", "polyak-2"), key=lambda name: median(measured["ms"][name]))
    title, lines = title_of(minibatches), []
    for peer, against in measured["ratios"][best].items():
        ratio, least = median(against), TARGETS[minibatches].get(peer)
        wanted = "" if least is None else f": {verdict(ratio, least)}"
        lines.append(f"{title}: {CONTESTANTS[best]} is {times(ratio)} times {CONTESTANTS[peer]}{wanted}")
    ms, slower = min(median(its) for its in measured["ms_alone"].values()), median(measured["slower"])
    lines.append(f"{title}: {ms:.1f} ms alone: {at_most(ms, MAX_MS[minibatches])}")
    lines.append(f"{title}: all on takes {times(slower)} times plain: {at_most(slower, MOST_FOR_ALL)}")
    return lines


def title_of(minibatches: int) -> str:
    return f"{minibatches} minibatches" if minibatches > 1 else "the full batch"


def memory_line(plan: dict[str, Any]) -> str:
    """What XLA plans for one shape of rollout, and what was wanted."""
    limit = 3 * plan["rollout"] + 4 * plan["params"]
    kilobytes = {name: f"{plan[name] / 1000:.0f} kB" for name in ("peak", "rollout", "params")}
    fits = at_most(plan["peak"] / limit, 1.0)
    return (
        f"memory, full batch of {plan['shape']}: {kilobytes['peak']} for a rollout of {kilobytes['rollout']} and parameters of "
        f"{kilobytes['params']}, {times(plan['peak'] / limit)} of 3 rollouts and 4 times the parameters: {fits}"
    )


def at_most(value: float, limit: float) -> str:
    """Whether the limit is kept, with the limit."""
    return f"{'yes' if value <= limit else 'NO'} (<= {limit:g})"


if __name__ == "__main__":
    main()
