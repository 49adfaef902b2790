"""Saves what was trained, loads its policy and acts with it: `python examples/save_and_load.py`."""

import tempfile

import gymnasium

import polyak

result = polyak.train.run("ppo", "CartPole-v1", env_steps=30_000)
policy = polyak.load_policy(result.save(tempfile.mkdtemp()))
print(result.evaluate(episodes=10))

env = gymnasium.make("CartPole-v1")
obs, _ = env.reset(seed=0)
done, total = False, 0.0
while not done:
    obs, reward, terminated, truncated, _ = env.step(policy.predict(obs)[0])
    done, total = terminated or truncated, total + float(reward)
print(f"the loaded policy's return: {total:.0f}")
