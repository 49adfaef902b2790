"""Time of one PPO update alone: polyak, TF-Agents and Stable-Baselines3 on the same synthetic rollout, taking turns.

    python benchmarks/ppo_update.py [--quick] [--json PATH]

8 environments x 256 steps, obs of 17 numbers, Box actions of 6 (the shape of HalfCheetah), two networks of (64, 64) tanh; 10
epochs x 32 minibatches, and 10 epochs over the full batch.

polyak             `update`, jitted, its state donated, as in its loops; values, log-probabilities and advantages of the rollout are
                   in its time
polyak, 2 devices  the same inside `jax.shard_map`, over two host devices, each with half of the environments
polyak, all on     with a KL penalty and cutoff, L2, value clipping, entropy, both normalisations and clipped log-probabilities
TF-Agents          `PPOClipAgent.train` in a `tf.function`: once for 10 epochs over the full batch, values and advantages included;
                   for minibatches 320 calls in a loop in one function, with `preprocess_sequence` before them, but without values
PPOLearner         what TF-Agents trains with minibatches by; it reads a `tf.data.Dataset` of the one rollout, here without Reverb
Stable-Baselines3  `train()`; values, log-probabilities and advantages, which it computes while it collects, are not in its time

Compilation and memory are of polyak's update. The peak is what XLA plans: arguments, results that do not take an argument's place,
and temporaries.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Pace, arguments, median, ratios, report, spread, table, take_turns, times, verdict
from peers import python_if_possible, python_of

NUM_ENVS, NUM_STEPS, OBS, ACTIONS, EPOCHS = 8, 256, 17, 6, 10
SHARED = {"learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5}
ALL_ON = {
    "ent_coef": 0.01,
    "clip_range_vf": 0.2,
    "clip_log_prob": 20.0,
    "kl_beta": 1.0,
    "kl_target": 0.01,
    "kl_cutoff_factor": 2.0,
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
    "polyak": "polyak",
    "polyak-2": "polyak, 2 devices",
    "polyak-all": "polyak, all on",
}
# By number of minibatches: how many times as fast as a peer, and milliseconds.
TARGETS = {32: {"sb3": 13.0, "tf_agents": 4.0, "learner": 6.0}, 1: {"tf_agents": 1.8}}
MAX_MS = {32: 36.0, 1: 14.0}
MOST_FOR_ALL, MAX_COMPILE = 1.5, 3.0
# A chunk of the gradient weighs the same whatever the rollout, so memory is looked at with a small one and a large one.
MEMORY_SHAPES = ((NUM_STEPS, NUM_ENVS), (1024, 128))


def synthetic(num_steps: int = NUM_STEPS, num_envs: int = NUM_ENVS) -> dict[str, Any]:
    """A stream of noise: `[T+1, B]` observations, rewards and flags, `[T, B]` actions; some episodes end, and then reset."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (num_steps + 1, num_envs)
    terminated = rng.random(shape) < 0.01
    terminated[0] = False
    for t in range(1, num_steps + 1):
        terminated[t] &= ~terminated[t - 1]
    first = np.concatenate([np.ones((1, num_envs), bool), terminated[:-1]])
    return {
        "obs": rng.normal(size=(*shape, OBS)).astype(np.float32),
        "actions": rng.normal(size=(num_steps, num_envs, ACTIONS)).astype(np.float32),
        "reward": np.where(first, 0, rng.normal(size=shape)).astype(np.float32),
        "terminated": terminated,
        "first": first,
    }


def polyak_agent(minibatches: int, settings: dict[str, Any]) -> Any:
    import polyak

    spec = polyak.envs.make(environment).spec
    fixed = {"num_steps": NUM_STEPS, "num_epochs": EPOCHS, "num_minibatches": minibatches, "max_grad_norm": 0.5}
    return polyak.PPO(spec=spec, **{**fixed, **SHARED, **settings})


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
    jax.config.update("jax_num_cpu_devices", devices)
    import polyak

    agent = polyak_agent(minibatches, ALL_ON if contestant == "polyak-all" else {})
    state = agent.init(jax.random.key(0))
    rollout = polyak_rollout(agent, state)
    keys = jax.random.split(jax.random.key(1), updates)
    update = agent.update if devices == 1 else over(devices, agent, rollout)
    state, rollout, keys = (jax.device_put(x, place) for x, place in zip((state, rollout, keys), places(devices), strict=True))
    start = time.perf_counter()
    step = jax.jit(update, donate_argnums=0).lower(state, rollout, keys[0]).compile()
    compiling = time.perf_counter() - start
    pace = Pace(polyak=polyak.__version__, jax=jax.__version__, compile_seconds=compiling)
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


def memory_worker() -> None:
    """What XLA plans for full-batch updates, as the worker's words about itself."""
    import jax

    found = []
    for num_steps, num_envs in MEMORY_SHAPES:
        agent = polyak_agent(1, {"num_steps": num_steps})
        state = agent.init(jax.random.key(0))
        rollout = polyak_rollout(agent, state, num_steps, num_envs)
        step = jax.jit(agent.update, donate_argnums=0).lower(state, rollout, jax.random.key(1)).compile()
        plan = step.memory_analysis()
        data, params = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (rollout, state.variables.params))
        peak = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
        found.append({"shape": f"{num_envs} x {num_steps}", "peak": peak, "rollout": data, "params": params})
    pace = Pace(memory=found)
    while True:
        pace.lap(0)


def tf_agents_worker(minibatches: int, updates: int, *, learner: bool) -> None:
    import tensorflow as tf
    import tf_agents

    agent = tf_agents_agent(minibatches)
    experience = trajectory_of(agent)
    if learner:
        update = learner_update(agent, experience, minibatches)
    elif minibatches == 1:
        train = tf.function(agent.train)
        update = lambda: train(experience)  # noqa: E731
    else:
        update = looped_update(agent, experience, minibatches)
    pace = Pace(tf_agents=tf_agents.__version__, tensorflow=tf.__version__)
    update()
    done = 0
    while True:
        for _ in range(updates):
            assert tf.math.is_finite(update().loss)
        done += updates
        pace.lap(done)


def tf_agents_agent(minibatches: int) -> Any:
    import tensorflow as tf
    from tf_agents.agents.ppo import ppo_actor_network, ppo_clip_agent
    from tf_agents.networks import value_network
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import time_step

    obs_spec = tensor_spec.TensorSpec((OBS,), tf.float32)
    action_spec = tensor_spec.BoundedTensorSpec((ACTIONS,), tf.float32, -1.0, 1.0)
    actor = ppo_actor_network.PPOActorNetwork().create_sequential_actor_net((64, 64), action_spec)
    agent = ppo_clip_agent.PPOClipAgent(
        time_step.time_step_spec(obs_spec),
        action_spec,
        # Its newer optimiser is slower here.
        optimizer=tf.keras.optimizers.legacy.Adam(SHARED["learning_rate"], epsilon=1e-5),
        actor_net=actor,
        value_net=value_network.ValueNetwork(obs_spec, fc_layer_params=(64, 64), activation_fn=tf.keras.activations.tanh),
        importance_ratio_clipping=SHARED["clip_range"],
        lambda_value=SHARED["gae_lambda"],
        discount_factor=SHARED["gamma"],
        value_pred_loss_coef=SHARED["vf_coef"],
        gradient_clipping=0.5,
        use_gae=True,
        use_td_lambda_return=True,
        normalize_rewards=False,
        normalize_observations=False,
        num_epochs=EPOCHS if minibatches == 1 else 1,
        compute_value_and_advantage_in_train=minibatches == 1,
        update_normalizers_in_train=minibatches == 1,
        train_step_counter=tf.Variable(0, dtype=tf.int64),
    )
    agent.initialize()
    return agent


def trajectory_of(agent: Any) -> Any:
    """The synthetic rollout as TF-Agents stores it, `[B, T+1]`, with what its policy says of it; the last step is padding."""
    import numpy as np
    import tensorflow as tf
    from tf_agents.trajectories import time_step, trajectory

    data = synthetic()
    step_type = np.where(data["first"], 0, np.where(data["terminated"], 2, 1)).astype(np.int32)
    by_env = lambda x: tf.constant(np.swapaxes(x, 0, 1))  # noqa: E731
    shifted = lambda x: by_env(np.concatenate([x[1:], x[-1:]]))  # noqa: E731
    obs = by_env(data["obs"])
    steps = time_step.TimeStep(by_env(step_type), by_env(data["reward"]), tf.ones(step_type.T.shape), obs)
    info = dict(agent.collect_policy.distribution(steps, ()).info)
    if "value_prediction" in agent.collect_data_spec.policy_info:
        info["value_prediction"] = agent.collect_policy.apply_value_network(obs, steps.step_type, value_state=())[0]
    return trajectory.Trajectory(
        step_type=steps.step_type,
        observation=obs,
        action=by_env(np.concatenate([data["actions"], data["actions"][-1:]])),
        policy_info=info,
        next_step_type=shifted(step_type),
        reward=shifted(data["reward"]),
        discount=shifted((~data["terminated"]).astype(np.float32)),
    )


def looped_update(agent: Any, experience: Any, minibatches: int) -> Callable[[], Any]:
    """All gradient steps of an update in one function: shuffled rows, `[M, 1]` at a time."""
    import tensorflow as tf

    rows, size = NUM_ENVS * NUM_STEPS, NUM_ENVS * NUM_STEPS // minibatches
    train = tf.autograph.experimental.do_not_convert(agent.train)

    @tf.function  # type: ignore[untyped-decorator]
    def update() -> Any:
        whole = agent.preprocess_sequence(experience)
        flat = tf.nest.map_structure(lambda x: tf.reshape(x[:, :-1], [rows, 1, *x.shape[2:]]), whole)
        orders = tf.reshape(tf.map_fn(lambda _: tf.random.shuffle(tf.range(rows)), tf.range(EPOCHS)), [-1, size])
        part = lambda i: tf.nest.map_structure(lambda x: tf.gather(x, orders[i]), flat)  # noqa: E731
        found = train(part(0))
        for i in tf.range(1, EPOCHS * minibatches):
            found = train(part(i))
        return found

    return update


def learner_update(agent: Any, experience: Any, minibatches: int) -> Callable[[], Any]:
    """`PPOLearner.run` over an endless dataset of the one rollout."""
    import tensorflow as tf
    from tf_agents.train import ppo_learner

    # Its minibatches are of stored steps, so the padding, which has no return, stays outside.
    whole = tf.nest.map_structure(lambda x: x[:, :-1], agent.preprocess_sequence(experience))
    dataset = lambda: tf.data.Dataset.from_tensors((whole, ())).repeat()  # noqa: E731
    learner = ppo_learner.PPOLearner(
        tempfile.mkdtemp(),
        agent.train_step_counter,
        agent,
        experience_dataset_fn=dataset,
        normalization_dataset_fn=dataset,
        num_samples=1,
        num_epochs=EPOCHS,
        minibatch_size=NUM_ENVS * NUM_STEPS // minibatches,
        shuffle_buffer_size=NUM_ENVS * NUM_STEPS,
        checkpoint_interval=-1,
        summary_interval=0,
    )
    return lambda: learner.run()


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
    with torch.no_grad():
        for t in range(NUM_STEPS):
            obs, actions = data["obs"][t], data["actions"][t]
            values, log_probs, _ = model.policy.evaluate_actions(torch.as_tensor(obs), torch.as_tensor(actions))
            starts = data["first"][t].astype(np.float32)
            model.rollout_buffer.add(obs, actions, data["reward"][t + 1], starts, values, log_probs)
        last_values = model.policy.predict_values(torch.as_tensor(data["obs"][-1]))
    model.rollout_buffer.compute_returns_and_advantage(last_values, dones=data["first"][-1].astype(np.float32))


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
    parser.add_argument("--worker", choices=[*CONTESTANTS, "memory"], help="(what it starts itself with, like the rest)")
    parser.add_argument("--minibatches", type=int, default=32)
    parser.add_argument("--updates", type=int, default=1)
    args = parser.parse_args()
    match args.worker:
        case None:
            compare_all(args.quick, args.rounds, args.json)
        case "memory":
            memory_worker()
        case "sb3":
            sb3_worker(args.minibatches, args.updates)
        case "tf_agents" | "learner":
            tf_agents_worker(args.minibatches, args.updates, learner=args.worker == "learner")
        case _:
            polyak_worker(args.worker, args.minibatches, args.updates)


def compare_all(quick: bool, rounds: int, json_path: Path | None) -> None:
    """Measure and report."""
    measured = {minibatches: compare(minibatches, quick, rounds) for minibatches in (32, 1)}
    header = ["10 epochs x", "contestant", "ms per update", "times SB3", "times TF-Agents", "times PPOLearner", "compiled in"]
    rows = [row for minibatches in measured for row in rows_of(measured[minibatches])]
    wanted = [line for minibatches in measured for line in verdicts(minibatches, measured[minibatches])]
    _, about = take_turns({"memory": [sys.executable, Path(__file__).resolve(), "--worker", "memory"]}, 0)
    memory = about["memory"]["memory"]
    wanted += [memory_line(plan) for plan in memory]
    text = table(header, rows) + "\n\n" + "\n".join(f"- {line}" for line in wanted)
    report(text, {"benchmark": "ppo_update", "quick": quick, "by_minibatches": measured, "memory": memory}, json_path)


def compare(minibatches: int, quick: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds per update of all, in turns."""
    me = Path(__file__).resolve()
    pythons = {"sb3": python_of("sb3"), "tf_agents": python_if_possible("tf_agents")}
    pythons["learner"] = pythons["tf_agents"] if minibatches > 1 else None
    calls = {"sb3": 4, "tf_agents": 8 if minibatches > 1 else 40, "learner": 4}
    commands = {}
    for name in CONTESTANTS:
        python = pythons.get(name, Path(sys.executable))
        if python is not None:
            updates = 1 if quick else calls.get(name, 40)
            commands[name] = [python, me, "--worker", name, "--minibatches", str(minibatches), "--updates", str(updates)]
    rates, about = take_turns(commands, 2 if quick else rounds)
    peers = [name for name in ("sb3", "tf_agents", "learner") if name in rates]
    return {
        "minibatches": minibatches,
        "ms": {name: [1000 / rate for rate in its] for name, its in rates.items()},
        "ratios": {name: {peer: ratios(rates, name, peer) for peer in peers} for name in rates},
        "slower": ratios(rates, "polyak", "polyak-all"),
        "about": about,
    }


def rows_of(measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one number of minibatches."""
    minibatches = measured["minibatches"]
    title = f"{minibatches} minibatches" if minibatches > 1 else "the full batch"
    rows = []
    for name, ms in measured["ms"].items():
        against = measured["ratios"][name]
        compared = [spread(against[peer], times) if peer in against else "" for peer in ("sb3", "tf_agents", "learner")]
        compiling = measured["about"][name].get("compile_seconds")
        seconds = "" if compiling is None else f"{compiling:.1f} s"
        rows.append([title, CONTESTANTS[name], spread(ms, "{:.1f}".format), *compared, seconds])
    return rows


def verdicts(minibatches: int, measured: dict[str, Any]) -> list[str]:
    """What was wanted of one number of minibatches; polyak is the faster of its one and two devices."""
    best = min(("polyak", "polyak-2"), key=lambda name: median(measured["ms"][name]))
    title = f"{minibatches} minibatches" if minibatches > 1 else "the full batch"
    lines = []
    for peer, least in TARGETS[minibatches].items():
        if peer in measured["ratios"][best]:
            ratio = median(measured["ratios"][best][peer])
            lines.append(f"{title}: {CONTESTANTS[best]} is {times(ratio)} times {CONTESTANTS[peer]}: {verdict(ratio, least)}")
    ms, slower = median(measured["ms"][best]), median(measured["slower"])
    lines.append(f"{title}: {ms:.1f} ms: {at_most(ms, MAX_MS[minibatches])}")
    lines.append(f"{title}: all on takes {times(slower)} times plain: {at_most(slower, MOST_FOR_ALL)}")
    seconds = max(about["compile_seconds"] for about in measured["about"].values() if "compile_seconds" in about)
    lines.append(f"{title}: compiled in {seconds:.1f} s at most: {at_most(seconds, MAX_COMPILE)}")
    return lines


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
