"""Normalizes observations and rewards; the statistics are saved with the agent: `python examples/normalization.py`."""

import tempfile

import polyak

env = polyak.envs.make("Pendulum-v1", num_envs=4)
agent = polyak.PPO(spec=env.spec, num_steps=256, gamma=0.9, normalize_obs=True, normalize_reward="return", clip_obs=10.0)
result = polyak.train.run(agent, env, env_steps=20_000)

# The loaded policy normalizes with the saved statistics, which do not change any more. Returns are not normalized.
policy = polyak.load_policy(result.save(tempfile.mkdtemp()))
print("torque of the loaded policy:", policy.predict([1.0, 0.0, 0.5])[0])
print(result.evaluate(episodes=8))
