"""A CNN of your own as the feature extractor of policy and value: `python examples/feature_extractor.py`."""

import jax.numpy as jnp
from flax import nnx

import polyak


class CustomCNN(nnx.Module):
    """Two convolutions and a layer of features for stacked images `[B, 4, 84, 84]`, with linear heads."""

    def __init__(self, spec, rngs, features=128):
        self.conv1 = nnx.Conv(spec.obs.shape[0], 32, (8, 8), strides=4, padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (4, 4), strides=2, padding="VALID", rngs=rngs)
        self.linear = nnx.Linear(9 * 9 * 64, features, rngs=rngs)
        self.logits = nnx.Linear(features, spec.action.n, rngs=rngs)
        self.value = nnx.Linear(features, 1, rngs=rngs)

    def __call__(self, obs):
        """The logits of the actions, and the values."""
        x = jnp.moveaxis(obs.astype(jnp.float32) / 255.0, 1, -1)
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        features = nnx.relu(self.linear(x.reshape(x.shape[0], -1)))
        return self.logits(features), self.value(features)[..., 0]


env = polyak.envs.make("ALE/Breakout-v5", num_envs=2)
agent = polyak.PPO(spec=env.spec, network=polyak.FlaxNNX(CustomCNN), num_steps=32, num_epochs=1, num_minibatches=4)
print(polyak.train.run(agent, env, env_steps=128))
