"""Time of learning at several widths: polyak beside a plain loop in JAX and Optax, with nothing but the algorithm, in turns.

    python benchmarks/plain_loop.py [--algorithms ppo sac dqn] [--widths 64 256 1024] [--threads 1 2] [--quick] [--json PATH]

ppo  one update on the rollout of `ppo_update.py`, 10 epochs x 32 minibatches of 64 samples, two networks of two layers
sac  64 gradient steps on batches of 256 drawn from a replay, an actor and two critics of two layers, 17 numbers to 6
dqn  64 gradient steps on batches of 128 drawn from a replay, two layers, 4 numbers to 2 actions, a soft update of the target

The plain loop is `jit` of `scan` with its state donated, hand-written layers and `optax.adam`. It checks nothing for NaN,
counts nothing, and reports the last loss alone. polyak's `update` also adds the rollout to its replay.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, table, take_turns, times, verdict
from ppo_peers import ACTIONS, EPOCHS, NUM_ENVS, NUM_STEPS, OBS, SHARED, synthetic

WIDTHS, STEPS, CAPACITY, GAMMA, TAU = (64, 256, 1024), 64, 10_000, 0.99, 0.005
BATCH = {"sac": 256, "dqn": 128}
MINIBATCHES = 32
TARGET = 0.95
"""Speed of polyak over the plain loop: 1.05 of its time."""


def plain_ppo(width: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The state, and one update of it with a key."""
    import jax
    import jax.numpy as jnp
    import optax

    data = {name: jnp.asarray(x) for name, x in synthetic().items()}
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "actor": layers(keys[0], (OBS, width, width, ACTIONS)),
        "critic": layers(keys[1], (OBS, width, width, 1)),
        "log_std": jnp.zeros(ACTIONS),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(SHARED["learning_rate"], eps=1e-5))

    def log_prob(params: Any, obs: Any, action: Any) -> Any:
        mean, log_std = forward(params["actor"], obs, jnp.tanh), params["log_std"]
        return jnp.sum(-0.5 * ((action - mean) * jnp.exp(-log_std)) ** 2 - log_std - 0.5 * jnp.log(2 * jnp.pi), axis=-1)

    def loss(params: Any, batch: Any) -> Any:
        advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
        ratio = jnp.exp(log_prob(params, batch["obs"], batch["action"]) - batch["log_prob"])
        clipped = jnp.clip(ratio, 1 - SHARED["clip_range"], 1 + SHARED["clip_range"])
        value = forward(params["critic"], batch["obs"], jnp.tanh)[:, 0]
        policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
        return policy_loss + SHARED["vf_coef"] * jnp.mean((value - batch["return"]) ** 2)

    def update(state: Any, key: Any) -> Any:
        params, _ = state
        value = forward(params["critic"], data["obs"], jnp.tanh)[..., 0]

        def backward(advantage: Any, step: Any) -> tuple[Any, Any]:
            value, next_value, reward, terminated = step
            delta = reward + SHARED["gamma"] * next_value * ~terminated - value
            advantage = delta + SHARED["gamma"] * SHARED["gae_lambda"] * ~terminated * advantage
            return advantage, advantage

        steps = value[:-1], value[1:], data["reward"][1:], data["terminated"][1:]
        _, advantage = jax.lax.scan(backward, jnp.zeros(NUM_ENVS), steps, reverse=True)
        batch = {
            "obs": data["obs"][:-1],
            "action": data["actions"],
            "log_prob": log_prob(params, data["obs"][:-1], data["actions"]),
            "advantage": advantage,
            "return": advantage + value[:-1],
        }
        batch = jax.tree.map(lambda x: x.reshape(NUM_STEPS * NUM_ENVS, *x.shape[2:]), batch)

        def minibatch(state: Any, index: Any) -> tuple[Any, Any]:
            return descend(optimizer, state, jax.value_and_grad(loss)(state[0], jax.tree.map(lambda x: x[index], batch)))

        def epoch(state: Any, key: Any) -> tuple[Any, Any]:
            order = jax.random.permutation(key, NUM_STEPS * NUM_ENVS)
            return jax.lax.scan(minibatch, state, order.reshape(MINIBATCHES, -1))

        return jax.lax.scan(epoch, state, jax.random.split(key, EPOCHS))

    return (params, optimizer.init(params)), update


def plain_sac(width: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The state, and 64 gradient steps of critics, actor and α."""
    import jax
    import jax.numpy as jnp
    import optax

    replay, optimizer = replay_of(OBS, ACTIONS), optax.adam(3e-4)
    keys = jax.random.split(jax.random.key(0), 2)
    critics = jax.vmap(lambda key: layers(key, (OBS + ACTIONS, width, width, 1)))(jax.random.split(keys[0], 2))
    networks = {"critics": critics, "actor": layers(keys[1], (OBS, width, width, 2 * ACTIONS)), "log_alpha": jnp.zeros(())}

    def values(critics: Any, obs: Any, action: Any) -> Any:
        inputs = jnp.concatenate([obs, action], axis=1)
        return jax.vmap(lambda one: forward(one, inputs, jax.nn.relu)[:, 0])(critics)

    def act(actor: Any, obs: Any, key: Any) -> tuple[Any, Any]:
        mean, log_std = jnp.split(forward(actor, obs, jax.nn.relu), 2, axis=1)
        log_std = jnp.clip(log_std, -20.0, 2.0)
        noise = jax.random.normal(key, mean.shape)
        x = mean + jnp.exp(log_std) * noise
        log_det = 2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))
        return jnp.tanh(x), jnp.sum(-0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi) - log_det, axis=1)

    def step(state: Any, key: Any) -> tuple[Any, Any]:
        networks, optimizers, target = state
        batch_key, next_key, actor_key, alpha_key = jax.random.split(key, 4)
        batch = draw(replay, batch_key, BATCH["sac"])
        alpha = jnp.exp(networks["log_alpha"])
        action, log_prob = act(networks["actor"], batch["next_obs"], next_key)
        value = values(target, batch["next_obs"], action).min(axis=0) - alpha * log_prob
        wanted = batch["reward"] + GAMMA * ~batch["terminated"] * value

        def critic_loss(critics: Any) -> Any:
            return jnp.sum(jnp.mean((values(critics, batch["obs"], batch["action"]) - wanted) ** 2, axis=1))

        def actor_loss(actor: Any) -> Any:
            action, log_prob = act(actor, batch["obs"], actor_key)
            return jnp.mean(alpha * log_prob - values(critics, batch["obs"], action).min(axis=0))

        networks, optimizers = dict(networks), dict(optimizers)
        found = jax.value_and_grad(critic_loss)(networks["critics"])
        (critics, optimizers["critics"]), loss = descend(optimizer, (networks["critics"], optimizers["critics"]), found)
        found = jax.value_and_grad(actor_loss)(networks["actor"])
        (actor, optimizers["actor"]), _ = descend(optimizer, (networks["actor"], optimizers["actor"]), found)
        # As TF-Agents does: of a draw of its own, by the new actor.
        found = loss, -(act(actor, batch["obs"], alpha_key)[1].mean() - ACTIONS)
        (log_alpha, optimizers["log_alpha"]), _ = descend(optimizer, (networks["log_alpha"], optimizers["log_alpha"]), found)
        target = optax.incremental_update(critics, target, TAU)
        return ({"critics": critics, "actor": actor, "log_alpha": log_alpha}, optimizers, target), loss

    optimizers = {name: optimizer.init(params) for name, params in networks.items()}
    update = lambda state, key: jax.lax.scan(step, state, jax.random.split(key, STEPS))  # noqa: E731
    return (networks, optimizers, jax.tree.map(jnp.copy, critics)), update


def plain_dqn(width: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The state, and 64 gradient steps of double DQN."""
    import jax
    import jax.numpy as jnp
    import optax

    replay, optimizer = replay_of(4, None), optax.adam(3e-4)
    params = layers(jax.random.key(0), (4, width, width, 2))

    def step(state: Any, key: Any) -> tuple[Any, Any]:
        (params, moments), target = state
        batch = draw(replay, key, BATCH["dqn"])
        best = jnp.argmax(forward(params, batch["next_obs"], jax.nn.relu), axis=1)
        value = forward(target, batch["next_obs"], jax.nn.relu)[jnp.arange(len(best)), best]
        wanted = batch["reward"] + GAMMA * ~batch["terminated"] * value

        def loss(params: Any) -> Any:
            q = forward(params, batch["obs"], jax.nn.relu)[jnp.arange(len(best)), batch["action"]]
            return jnp.mean(optax.huber_loss(q, wanted))

        trained, value_of_loss = descend(optimizer, (params, moments), jax.value_and_grad(loss)(params))
        return (trained, optax.incremental_update(trained[0], target, TAU)), value_of_loss

    update = lambda state, key: jax.lax.scan(step, state, jax.random.split(key, STEPS))  # noqa: E731
    return ((params, optimizer.init(params)), jax.tree.map(jnp.copy, params)), update


def layers(key: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Weights and biases."""
    import jax
    import jax.numpy as jnp

    keys, shapes = jax.random.split(key, len(sizes) - 1), itertools.pairwise(sizes)
    return [(jax.random.normal(k, shape) / shape[0] ** 0.5, jnp.zeros(shape[1])) for k, shape in zip(keys, shapes, strict=True)]


def forward(layers: Any, x: Any, activation: Callable[[Any], Any]) -> Any:
    """Outputs of a network of these layers."""
    for kernel, bias in layers[:-1]:
        x = activation(x @ kernel + bias)
    kernel, bias = layers[-1]
    return x @ kernel + bias


def descend(optimizer: Any, state: Any, found: Any) -> tuple[Any, Any]:
    """The parameters and moments after a step, and the loss."""
    import optax

    (params, moments), (loss, gradient) = state, found
    updates, moments = optimizer.update(gradient, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def replay_of(obs: int, actions: int | None) -> Any:
    """Random transitions; None is two Discrete actions."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    action = rng.integers(0, 2, CAPACITY) if actions is None else rng.uniform(-1, 1, (CAPACITY, actions)).astype(np.float32)
    replay = {
        "obs": rng.normal(size=(CAPACITY, obs)).astype(np.float32),
        "next_obs": rng.normal(size=(CAPACITY, obs)).astype(np.float32),
        "reward": rng.normal(size=CAPACITY).astype(np.float32),
        "terminated": rng.random(CAPACITY) < 0.01,
        "action": action,
    }
    return {name: jnp.asarray(x) for name, x in replay.items()}


def draw(replay: Any, key: Any, size: int) -> Any:
    """Uniformly drawn transitions."""
    import jax

    index = jax.random.randint(key, (size,), 0, CAPACITY)
    return jax.tree.map(lambda x: x[index], replay)


def polyak_update(algorithm: str, width: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The state of an agent with the same sizes and settings, its replay full, and `update`."""
    import jax
    import numpy as np

    import polyak
    from polyak import Rollout, TimeStep
    from polyak.core.spaces import Box, Discrete, EnvSpec

    obs = 4 if algorithm == "dqn" else OBS
    space = Discrete(2) if algorithm == "dqn" else Box([-1.0] * ACTIONS, [1.0] * ACTIONS)
    spec = EnvSpec(Box([-np.inf] * obs, [np.inf] * obs), space)
    if algorithm == "ppo":
        network = polyak.MLP((width, width))
        sizes = {"num_steps": NUM_STEPS, "num_epochs": EPOCHS, "num_minibatches": MINIBATCHES, "max_grad_norm": 0.5}
        agent: Any = polyak.PPO(spec, network, **sizes, **SHARED)
        data = synthetic()
    else:
        common = {"replay": polyak.UniformReplay(CAPACITY), "num_steps": STEPS, "updates_per_step": 1.0, "tau": TAU}
        common |= {"batch_size": BATCH[algorithm], "learning_rate": 3e-4, "learning_starts": 0}
        if algorithm == "sac":
            agent = polyak.SAC(spec, actor=polyak.Actor((width, width)), critics=polyak.Critics((width, width)), **common)
        else:
            network = polyak.MLP((width, width), activation="relu", head=polyak.QValues())
            agent = polyak.DQN(spec, network, target_period=1, **common)
        rng, shape = np.random.default_rng(0), (STEPS + 1, 1)
        actions = rng.integers(0, 2, (STEPS, 1), np.int32) if algorithm == "dqn" else rng.uniform(-1, 1, (STEPS, 1, ACTIONS))
        data = {
            "obs": rng.normal(size=(*shape, obs)).astype(np.float32),
            "actions": actions if algorithm == "dqn" else actions.astype(np.float32),
            "reward": rng.normal(size=shape).astype(np.float32),
            "terminated": np.zeros(shape, bool),
            "first": np.zeros(shape, bool),
        }
    state = agent.init(jax.random.key(0))
    no = np.zeros_like(data["terminated"])
    time_steps = TimeStep(data["obs"], data["reward"], data["terminated"], no, data["first"])
    carry = agent.collect_policy(state).initial_state(data["reward"].shape[1])
    rollout = jax.device_put(Rollout(time_steps, data["actions"], (), carry))
    if algorithm != "ppo":
        add = jax.jit(agent.add, donate_argnums=0)
        for _ in range(CAPACITY // STEPS):
            state = add(state, rollout)
    return state, lambda state, key: agent.update(state, rollout, key)


def worker(contestant: str, algorithm: str, width: int, threads: int, updates: int) -> None:
    few_threads(threads)
    import jax
    import jax.numpy as jnp
    import numpy as np

    pace = Pace(jax=jax.__version__)
    plain = {"ppo": plain_ppo, "sac": plain_sac, "dqn": plain_dqn}
    first, update = plain[algorithm](width) if contestant == "plain" else polyak_update(algorithm, width)
    step = jax.jit(update, donate_argnums=0).lower(first, jax.random.key(1)).compile()
    keys, done = jax.random.split(jax.random.key(1), updates), 0
    while True:
        # From the first parameters in each turn: with the same rollout again and again, PPO diverges.
        state = jax.block_until_ready(jax.tree.map(jnp.copy, first))
        for key in keys:
            state, said = step(state, key)
        jax.block_until_ready(state)
        loss = said.ravel()[-1] if contestant == "plain" else said["train/skipped_steps"]
        assert np.isfinite(loss) and (contestant == "plain" or int(loss) == 0)
        done += updates
        pace.lap(done)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--algorithms", nargs="+", choices=("ppo", "sac", "dqn"), default=["ppo", "sac", "dqn"])
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--worker", choices=("polyak", "plain"), help="(what it starts itself with)")
    parser.add_argument("--updates", type=int, default=1)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.algorithms[0], args.widths[0], args.threads[0], args.updates)
        return
    rows, measured = [], {}
    for algorithm in args.algorithms:
        for width in args.widths:
            for threads in args.threads:
                updates = 1 if args.quick or width >= 1024 else 4 if width >= 256 else 20
                case = ["--algorithms", algorithm, "--widths", width, "--threads", threads, "--updates", updates]
                me = [sys.executable, Path(__file__).resolve()]
                commands = {name: [*me, "--worker", name, *case] for name in ("polyak", "plain")}
                rates, _ = take_turns(commands, 2 if args.quick else args.rounds)
                faster = ratios(rates, "polyak", "plain")
                ms = {name: [1000 / rate for rate in its] for name, its in rates.items()}
                measured[f"{algorithm} {width} {threads}"] = {"ms": ms, "ratios": faster}
                cells = [spread(ms[name], "{:.1f}".format) for name in ("polyak", "plain")]
                met = verdict(median(faster), TARGET)
                rows.append([algorithm, str(width), str(threads), *cells, spread(faster, times), met])
    header = ["algorithm", "width", "threads", "ms of polyak", "of the plain loop", "times the plain loop", "target"]
    report(table(header, rows), {"benchmark": "plain_loop", "quick": args.quick, "by_case": measured}, args.json)


if __name__ == "__main__":
    main()
