"""Env steps per second of polyak's PPO on Craftax-Classic-Symbolic, beside a plain loop that does as little as PPO needs.

    python benchmarks/craftax_ppo.py [--quick] [--json PATH] [--rounds 5]

It needs `pip install '.[craftax]'`. The plain loop is a single function in the style of PureJaxRL: Flax, Optax, one scan over
updates, no episode statistics, no checks, no handling of truncation, and optimistic resets, which compute fresh worlds for a
sixteenth of the environments in every step and hand the same world to several that ended together. polyak gives every episode
a world of its own (`reset_pool="auto"`). Both: 64 environments, 64 steps, 4 epochs x 8 minibatches, an actor and a critic of
(256, 256) tanh, γ 0.99, λ 0.8, learning rate 2e-4, clipping 0.2, gradients clipped to 1. Compilation is not counted. polyak
counts valid transitions only.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from harness import Pace, arguments, median, ratios, report, spread, steps, table, take_turns, times, verdict

ENV = "Craftax-Classic-Symbolic-v1"
NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES, WIDTH = 64, 64, 4, 8, 256
GAMMA, LAMBDA, RATE, CLIP, ENTROPY = 0.99, 0.8, 2e-4, 0.2, 0.01
RESETS = NUM_ENVS // 16
LAPS = 10_000
TARGET = 1.0


def polyak_worker() -> None:
    import jax

    import polyak

    pace = Pace(polyak=polyak.__version__, jax=jax.__version__)
    env = polyak.envs.make(f"craftax/{ENV}", num_envs=NUM_ENVS)
    agent = polyak.PPO(
        env.spec,
        network=polyak.MLP((WIDTH, WIDTH)),
        num_steps=NUM_STEPS,
        num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        learning_rate=RATE,
        clip_range=CLIP,
        ent_coef=ENTROPY,
        max_grad_norm=1.0,
    )
    every = NUM_ENVS * NUM_STEPS
    polyak.loops.compiled(
        agent,
        env,
        env_steps=LAPS * every,
        key=jax.random.key(0),
        report_every=every,
        callbacks=[lambda progress, metrics, state: pace.lap(progress.env_steps)],
    )


def plain_worker() -> None:
    import jax

    pace = Pace(jax=jax.__version__)
    start, update = plain_ppo()
    state = jax.jit(start)(jax.random.key(0))
    program = jax.jit(update, donate_argnums=0)
    for number in range(LAPS):
        state = jax.block_until_ready(program(state))
        # The first call takes the types of a fresh state, the second those of its own result: each compiles.
        if number:
            pace.lap((number + 1) * NUM_ENVS * NUM_STEPS)


def plain_ppo() -> tuple[Any, Any]:
    """`start(key)`, the state of training, and `update(state)`, the state after one rollout and its epochs."""
    import jax
    import jax.numpy as jnp
    import optax
    from craftax.craftax_env import make_craftax_env_from_name
    from flax import linen as nn

    env = make_craftax_env_from_name(ENV, auto_reset=False)
    params = env.default_params
    num_actions = env.action_space(params).n

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> tuple[Any, Any]:
            heads = []
            for outputs, gain in ((num_actions, 0.01), (1, 1.0)):
                h = x
                for _ in range(2):
                    h = nn.tanh(nn.Dense(WIDTH, kernel_init=nn.initializers.orthogonal(2**0.5))(h))
                heads.append(nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(gain))(h))
            return heads[0], heads[1][..., 0]

    net, optimizer = Net(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE, eps=1e-5))

    def start(key: Any) -> Any:
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, NUM_ENVS), params)
        weights = net.init(key, obs)
        return weights, optimizer.init(weights), obs, env_state, key

    def env_step(key: Any, env_state: Any, action: Any) -> Any:
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, NUM_ENVS)
        obs, after, reward, done, _ = jax.vmap(env.step_env, in_axes=(0, 0, 0, None))(keys, env_state, action, params)
        fresh_obs, fresh = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(reset_key, RESETS), params)
        # The first environments that ended get a world each; those beyond share them.
        chosen = (jnp.cumsum(done) - 1) % RESETS

        def pick(new: Any, old: Any) -> Any:
            return jnp.where(done.reshape(-1, *(1,) * (old.ndim - 1)), new[chosen], old)

        return pick(fresh_obs, obs), jax.tree.map(pick, fresh, after), reward, done

    def loss(weights: Any, batch: Any) -> Any:
        obs, action, old, advantage, target = batch
        logits, value = net.apply(weights, obs)
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
        ratio, normal = jnp.exp(log_prob - old), (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normal)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
        return -surrogate.mean() + 0.5 * jnp.square(value - target).mean() - ENTROPY * entropy.mean()

    def update(state: Any) -> Any:
        weights, optimizer_state, obs, env_state, key = state
        key, rollout_key, *epoch_keys = jax.random.split(key, EPOCHS + 2)

        def act(carry: Any, key: Any) -> Any:
            obs, env_state = carry
            logits, value = net.apply(weights, obs)
            action = jax.random.categorical(key, logits)
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]
            after, env_state, reward, done = env_step(jax.random.fold_in(key, 1), env_state, action)
            return (after, env_state), (obs, action, log_prob, value, reward, done)

        (obs, env_state), rows = jax.lax.scan(act, (obs, env_state), jax.random.split(rollout_key, NUM_STEPS))
        seen, action, log_prob, value, reward, done = rows
        last = net.apply(weights, obs)[1]

        def back(carry: Any, row: Any) -> Any:
            advantage, next_value = carry
            value, reward, done = row
            error = reward + GAMMA * next_value * ~done - value
            advantage = error + GAMMA * LAMBDA * ~done * advantage
            return (advantage, value), advantage

        _, advantage = jax.lax.scan(back, (jnp.zeros_like(last), last), (value, reward, done), reverse=True)
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen, action, log_prob, advantage, advantage + value))

        def minibatch(carry: Any, index: Any) -> Any:
            weights, optimizer_state = carry
            gradient = jax.grad(loss)(weights, jax.tree.map(lambda x: x[index], data))
            change, optimizer_state = optimizer.update(gradient, optimizer_state, weights)
            return (optax.apply_updates(weights, change), optimizer_state), None

        size = NUM_ENVS * NUM_STEPS
        index = jnp.concatenate([jax.random.permutation(k, size).reshape(MINIBATCHES, -1) for k in epoch_keys])
        (weights, optimizer_state), _ = jax.lax.scan(minibatch, (weights, optimizer_state), index)
        return weights, optimizer_state, obs, env_state, key

    return start, update


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--worker", choices=["polyak", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        {"polyak": polyak_worker, "plain": plain_worker}[args.worker]()
        return
    me = Path(__file__).resolve()
    commands = {name: [sys.executable, me, "--worker", name] for name in ("plain", "polyak")}
    rates, about = take_turns(commands, 1 if args.quick else args.rounds, one_by_one=True)
    ratio = ratios(rates, "polyak", "plain")
    rows = [
        ["plain loop", spread(rates["plain"], steps), "1", "", f"{about['plain']['peak_mb']:.0f} MB"],
        ["polyak", spread(rates["polyak"], steps), spread(ratio, times), verdict(median(ratio), TARGET),
         f"{about['polyak']['peak_mb']:.0f} MB"],
    ]  # fmt: skip
    text = table(["contestant", "env_steps/s", "times the plain loop", "target", "peak memory"], rows)
    report(text, {"benchmark": "craftax_ppo", "quick": args.quick, "rates": rates, "ratio": ratio, "about": about}, args.json)


if __name__ == "__main__":
    main()
