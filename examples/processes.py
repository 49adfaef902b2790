"""Trains in four environments, each in its own process: `python examples/processes.py`.

Processes pay where one step of the environment takes milliseconds; CartPole is faster without them.
"""

import polyak


def main() -> None:
    env = polyak.envs.make("CartPole-v1", num_envs=4, vectorization="async")
    result = polyak.train.run(polyak.PPO(spec=env.spec, num_steps=128), env, env_steps=25_000)
    time_step = env.reset(seed=0)
    for _ in range(200):
        action, _ = result.policy.predict(time_step.obs)
        time_step = env.step(action)
    env.close()
    print(result)


if __name__ == "__main__":  # each process imports this file
    main()
