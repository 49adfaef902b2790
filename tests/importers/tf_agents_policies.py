"""Writes the policies of `tf_agents_policies/`: `python tests/importers/tf_agents_policies.py`, with TF-Agents 0.19.

TF-Agents 0.19 needs TensorFlow 2.15.1. Never run by the tests, which need neither.
"""

import tempfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).with_suffix("")
NUM_OBS = 1000


def observations(size):
    """The observations on which the saved policies and polyak's are compared."""
    return np.random.default_rng(0).normal(0.5, 2.0, (NUM_OBS, size)).astype(np.float32)


def main():
    import tensorflow as tf
    from tf_agents.agents.ppo import ppo_clip_agent
    from tf_agents.networks import actor_distribution_network, value_network
    from tf_agents.policies import policy_saver
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import time_step as ts

    FOLDER.mkdir(exist_ok=True)
    keras = tf.keras.activations
    bounds = (np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
    tasks = {
        "discrete": (4, tensor_spec.BoundedTensorSpec((), tf.int32, 0, 2), (16, 12), (8,), keras.tanh, True),
        "box": (3, tensor_spec.BoundedTensorSpec((2,), tf.float32, *bounds), (12, 12), (12, 12), keras.relu, True),
        "plain": (3, tensor_spec.BoundedTensorSpec((2,), tf.float32, *bounds), (12,), (8, 4), keras.relu, False),
    }
    for name, (size, action, hidden, value_hidden, activation, normalizes) in tasks.items():
        tf.random.set_seed(0)
        obs = tensor_spec.TensorSpec((size,), tf.float32)
        agent = ppo_clip_agent.PPOClipAgent(
            ts.time_step_spec(obs),
            action,
            optimizer=tf.keras.optimizers.Adam(),
            actor_net=actor_distribution_network.ActorDistributionNetwork(
                obs, action, fc_layer_params=hidden, activation_fn=activation
            ),
            value_net=value_network.ValueNetwork(obs, fc_layer_params=value_hidden, activation_fn=activation),
            normalize_observations=normalizes,
        )
        agent.initialize()
        for i, variable in enumerate(agent.policy.variables()):
            if variable.trainable:
                # Larger than initial weights, so that the greedy action depends on the observation.
                noise = tf.random.stateless_normal(variable.shape, seed=(i, 1))
                variable.assign_add(noise if name == "discrete" else 0.4 * noise)
        if normalizes:
            agent._observation_normalizer.update(tf.constant(observations(size)[:100] * 3 + 1))
        with tempfile.TemporaryDirectory() as directory:
            policy_saver.PolicySaver(agent.policy).save(directory)
            model = tf.saved_model.load(directory)
            np.savez(FOLDER / f"{name}.npz", **{variable.name: variable.numpy() for variable in model.model_variables})
            time_step = ts.restart(tf.constant(observations(size)), batch_size=NUM_OBS)
            distribution = agent.collect_policy.distribution(time_step).action
            np.save(FOLDER / f"{name}.npy", model.action(time_step).action.numpy())
        value, _ = agent._value_net(
            agent._observation_normalizer.normalize(time_step.observation) if normalizes else time_step.observation
        )
        np.save(FOLDER / f"{name}_value.npy", value.numpy()[:10])
        if name != "discrete":
            np.save(FOLDER / f"{name}_std.npy", distribution.stddev().numpy()[0])


if __name__ == "__main__":
    main()
