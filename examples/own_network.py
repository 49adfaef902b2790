"""A network of your own, as a Flax NNX module: `python examples/own_network.py`.

It returns the parameters of the action distribution and the value of each observation. For Discrete actions the
parameters are logits; for Box actions a dict of `loc` and `log_scale`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import polyak


class Gated(nnx.Module):
    """A Gaussian policy for Pendulum: one layer gated by another, and a standard deviation that depends on the state."""

    def __init__(self, spec, rngs):
        inputs, outputs = spec.obs.shape[0], spec.action.shape[0]
        self.features = nnx.Linear(inputs, 64, rngs=rngs)
        self.gate = nnx.Linear(inputs, 64, rngs=rngs)
        self.action = nnx.Linear(64, 2 * outputs, kernel_init=nnx.initializers.orthogonal(0.01), rngs=rngs)
        self.value = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, obs):
        """The parameters of the action distribution, and the values, for observations `[B, 3]`."""
        x = nnx.tanh(self.features(obs)) * nnx.sigmoid(self.gate(obs))
        loc, log_scale = jnp.split(self.action(x), 2, axis=-1)
        return {"loc": loc, "log_scale": log_scale}, self.value(x)[..., 0]


def main(env_steps: int = 100_000) -> int:
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=16)
    agent = polyak.PPO(
        spec=env.spec,
        network=polyak.FlaxNNX(Gated),
        num_steps=128,
        num_epochs=10,
        num_minibatches=16,
        gamma=0.9,
        learning_rate=polyak.Linear(1e-3, env_steps=env_steps),
    )
    result = polyak.train.run(agent, env, env_steps=env_steps, key=jax.random.key(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(result.state.copies.online.params))
    evaluation = polyak.train.evaluate(agent.policy(result.state), env, episodes=16, key=jax.random.key(1))
    print(f"greedy return {evaluation.mean_return:.0f} with {parameters} parameters")
    return parameters


if __name__ == "__main__":
    main()
