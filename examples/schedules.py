"""Schedules of the learning rate and the clip range: `python examples/schedules.py`."""

import polyak

agent = polyak.PPO(
    spec=polyak.envs.make("CartPole-v1", num_envs=8).spec,
    learning_rate=polyak.Linear(1e-3, env_steps=30_000),  # to 0 over the training
    clip_range=polyak.schedules.Exponential(0.2, factor=0.5, env_steps=20_000),  # halved every 20,000 env_steps
)
print(polyak.train.run(agent, polyak.envs.make("CartPole-v1", num_envs=8), env_steps=30_000))
