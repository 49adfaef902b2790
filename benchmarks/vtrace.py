"""What V-trace is worth: IMPALA and A2C on rollouts whose policy is many updates old, on CartPole in JAX.

    python benchmarks/vtrace.py [--quick] [--json PATH] [--lags 0 16] [--seeds 10]

A queue in one compiled program holds as many rollouts as the lag; every update takes the oldest, and the newest policy collects
the next. A2C treats the actions as those of its newest policy, which is IMPALA with all ratios 1; all other settings are equal,
and each gradient is of 20 steps of 8 environments; steps that reset an environment are counted here. All seeds train at once,
and their greedy policies play 100 episodes of at most 500 steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, report, table

import polyak

ENV, NUM_ENVS, NUM_STEPS, ENV_STEPS, EPISODES = "jax/CartPole-v1", 8, 20, 300_000, 100
LEARNING_RATE = 3e-3


def train(agent: Any, env: Any, lag: int, updates: int, key: jax.Array) -> Any:
    """The agent's state after `updates`, each on the rollout that was collected `lag` updates before."""

    def collect(agent_state: Any, place: Any, key: jax.Array) -> tuple[polyak.Rollout, Any]:
        policy = agent.collect_policy(agent_state)

        def step(place: Any, key: jax.Array) -> tuple[Any, Any]:
            env_state, time_step, carry = place
            act_key, env_key = jax.random.split(key)
            taken = policy.action(time_step, carry, act_key)
            env_state, time_step = env.step(env_state, taken.action, env_key)
            return (env_state, time_step, taken.carry), (time_step, taken.action, taken.info)

        _, first, carry = place
        place, (time_steps, actions, info) = jax.lax.scan(step, place, jax.random.split(key, agent.num_steps))
        time_steps = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), first, time_steps)
        return polyak.Rollout(time_steps, actions, info, carry), place

    def fill(place: Any, key: jax.Array) -> tuple[Any, Any]:
        rollout, place = collect(agent_state, place, key)
        return place, rollout

    def iterate(loop: Any, number_and_key: Any) -> tuple[Any, None]:
        agent_state, place, queue = loop
        number, key = number_and_key
        collect_key, update_key = jax.random.split(key)
        newest, place = collect(agent_state, place, collect_key)
        oldest = newest
        if lag:
            oldest = jax.tree.map(lambda rollouts: rollouts[number % lag], queue)
            queue = jax.tree.map(lambda rollouts, rollout: rollouts.at[number % lag].set(rollout), queue, newest)
        agent_state, _ = agent.update(agent_state, oldest, update_key)
        return (agent_state, place, queue), None

    agent_key, env_key, fill_key, key = jax.random.split(key, 4)
    agent_state = agent.init(agent_key)
    place = (*env.init(env_key), agent.collect_policy(agent_state).initial_state(env.num_envs))
    place, queue = jax.lax.scan(fill, place, jax.random.split(fill_key, lag))
    numbers_and_keys = (jnp.arange(updates), jax.random.split(key, updates))
    (agent_state, _, _), _ = jax.lax.scan(iterate, (agent_state, place, queue), numbers_and_keys)
    return agent_state


def returns_of(algorithm: str, lag: int, env_steps: int, seeds: int) -> list[float]:
    """The mean greedy return of each seed."""
    env, judge = polyak.envs.make(ENV, num_envs=NUM_ENVS), polyak.envs.make(ENV, num_envs=EPISODES)
    agent = getattr(polyak, algorithm)(env.spec, num_steps=NUM_STEPS, learning_rate=LEARNING_RATE)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    states = jax.jit(jax.vmap(lambda key: train(agent, env, lag, env_steps // (NUM_ENVS * NUM_STEPS), key)))(keys)
    returns = []
    for seed in range(seeds):
        policy = agent.policy(jax.tree.map(lambda x, seed=seed: x[seed], states))
        key = jax.random.key(1000 + seed)
        returns.append(float(polyak.train.evaluate(policy, judge, episodes=EPISODES, key=key).mean_return))
    return returns


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 16], help="how many updates old a rollout's policy is")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    env_steps, seeds, lags = (5_000, 2, args.lags[-1:]) if args.quick else (ENV_STEPS, args.seeds, args.lags)
    rows, found = [], []
    for lag in lags:
        for algorithm in ("IMPALA", "A2C"):
            returns = returns_of(algorithm, lag, env_steps, seeds)
            found.append({"algorithm": algorithm, "lag": lag, "returns": returns})
            by_seed = ", ".join(f"{one:.0f}" for one in sorted(returns))
            title = algorithm if algorithm == "IMPALA" else "A2C, no V-trace"
            rows.append([lag, title, f"{np.mean(returns):.1f}", by_seed])
    text = table(["lag", "algorithm", "mean return", f"by seed, after {env_steps:,} steps"], rows)
    report(text, {"benchmark": "vtrace", "quick": args.quick, "env_steps": env_steps, "runs": found}, args.json)


if __name__ == "__main__":
    main()
