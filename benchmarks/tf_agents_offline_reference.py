"""Writes losses and gradients of TF-Agents, for tests/agents/test_offline_tf_agents.py; its environment has no polyak.

pip install -r benchmarks/requirements-tf_agents.txt
python benchmarks/tf_agents_offline_reference.py tests/agents/reference/tf_agents_offline.npz
"""

import sys

import numpy as np
import tensorflow as tf
import tf_agents
from tf_agents.agents.behavioral_cloning.behavioral_cloning_agent import BehavioralCloningAgent
from tf_agents.agents.cql.cql_sac_agent import CqlSacAgent
from tf_agents.agents.ddpg.actor_network import ActorNetwork
from tf_agents.agents.ddpg.critic_network import CriticNetwork
from tf_agents.agents.sac.tanh_normal_projection_network import TanhNormalProjectionNetwork
from tf_agents.networks.actor_distribution_network import ActorDistributionNetwork
from tf_agents.networks.q_network import QNetwork
from tf_agents.specs import BoundedTensorSpec, TensorSpec
from tf_agents.trajectories import time_step as ts
from tf_agents.trajectories import trajectory

ROWS, OBS, DIMENSIONS, HIDDEN, SAMPLES, GAMMA, CQL_ALPHA, TAU = 8, 3, 2, 5, 4, 0.97, 1.6, 0.7
OBS_SPEC = TensorSpec([OBS], tf.float32)
BOX = BoundedTensorSpec([DIMENSIONS], tf.float32, -1.0, 1.0)
DISCRETE = BoundedTensorSpec([], tf.int64, 0, 3)
TIME_STEPS = ts.time_step_spec(OBS_SPEC)


def make_batch(rng, action):
    arrays = {"obs": rng.normal(size=(ROWS, OBS)), "next_obs": rng.normal(size=(ROWS, OBS)), "reward": rng.normal(size=ROWS)}
    arrays["discount"] = (rng.random(ROWS) > 0.25).astype(float)
    return {name: x.astype(np.float32) for name, x in arrays.items()} | {"action": action}


def steps(obs, reward, discount):
    step_type = tf.fill([ROWS], ts.StepType.MID)
    return ts.TimeStep(step_type, tf.constant(reward), tf.constant(discount), tf.constant(obs))


def dense(layer):
    return {"kernel": layer.kernel, "bias": layer.bias}


def layers(network):
    """The hidden layer and the head."""
    found = [layer for layer in flat(network) if isinstance(layer, tf.keras.layers.Dense)]
    assert len(found) == 2, found
    return dict(zip(("hidden", "out"), map(dense, found), strict=True))


def flat(layer):
    inner = getattr(layer, "layers", None) or []
    return [layer] if not inner else [leaf for part in inner for leaf in flat(part)]


def shake(networks, seed):
    """Random weights, so that targets differ from online networks and biases from 0."""
    rng = np.random.default_rng(seed)
    for network in networks:
        for variable in network.variables:
            variable.assign(0.5 * rng.normal(size=variable.shape))


def flatten(tree, prefix):
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree)}
    return {name: x for key, part in tree.items() for name, x in flatten(part, f"{prefix}/{key}").items()}


def values(tree):
    return {name: values(part) if isinstance(part, dict) else part.numpy() for name, part in tree.items()}


def gradient(loss_of, trees):
    """The loss, and its gradients in the form of the trees of variables."""
    with tf.GradientTape() as tape:
        loss = loss_of()
    return loss.numpy(), values(tape.gradient(loss, trees))


def cql(rng, entropy):
    actor = ActorDistributionNetwork(
        OBS_SPEC,
        BOX,
        fc_layer_params=(HIDDEN,),
        activation_fn=tf.keras.activations.tanh,
        continuous_projection_net=TanhNormalProjectionNetwork,
    )
    critic = CriticNetwork((OBS_SPEC, BOX), joint_fc_layer_params=(HIDDEN,), activation_fn=tf.keras.activations.tanh)
    agent = CqlSacAgent(
        TIME_STEPS,
        BOX,
        critic_network=critic,
        actor_network=actor,
        actor_optimizer=tf.keras.optimizers.SGD(0.1),
        critic_optimizer=tf.keras.optimizers.SGD(0.1),
        alpha_optimizer=tf.keras.optimizers.SGD(0.1),
        cql_alpha=CQL_ALPHA,
        num_cql_samples=SAMPLES,
        include_critic_entropy_term=entropy,
        use_lagrange_cql_alpha=True,
        cql_tau=TAU,
        gamma=GAMMA,
        initial_log_alpha=-0.4,
    )
    agent.initialize()
    online, target = (
        (agent._critic_network_1, agent._critic_network_2),
        (
            agent._target_critic_network_1,
            agent._target_critic_network_2,
        ),
    )
    shake((actor, *online, *target), 7)
    batch = make_batch(rng, np.tanh(rng.normal(size=(ROWS, DIMENSIONS))).astype(np.float32))
    now = steps(batch["obs"], np.zeros(ROWS, np.float32), np.ones(ROWS, np.float32))
    after = steps(batch["next_obs"], batch["reward"], batch["discount"])
    draws = {}
    record(agent, "_sample_and_transpose_actions_and_log_probs", draws, "policy")
    record(agent, "_actions_and_log_probs", draws, "single")
    uniform = tf.random.uniform

    def recorded_uniform(*arguments, **options):
        drawn = uniform(*arguments, **options)
        draws["uniform"] = drawn
        return drawn

    trees = {f"critic{i}": layers(network) for i, network in enumerate(online)}
    out = {"batch": batch, "critics": values(trees)}
    out["target"] = values({f"critic{i}": layers(network) for i, network in enumerate(target)})
    actions = tf.constant(batch["action"])

    def critic_loss():
        return tf.reduce_mean(
            agent._critic_loss_with_optional_entropy_term(
                now, actions, after, tf.math.squared_difference, gamma=GAMMA, training=True
            )
        )

    out["loss"], out["gradient"] = {}, {}
    out["loss"]["td"], out["gradient"]["td"] = gradient(critic_loss, trees)
    out["next"] = {"action": draws["single"][0].numpy(), "log_prob": draws["single"][1].numpy()}
    tf.random.uniform = recorded_uniform
    try:
        out["loss"]["gap"], out["gradient"]["gap"] = gradient(lambda: agent._cql_loss(now, actions, training=True), trees)
    finally:
        tf.random.uniform = uniform
    shape = (ROWS, SAMPLES, DIMENSIONS)
    out["samples"] = {"action": draws["policy"][0].numpy(), "log_prob": draws["policy"][1].numpy()}
    out["uniform"] = draws["uniform"].numpy().reshape(shape)
    with tf.GradientTape() as tape:
        loss = -agent._get_cql_alpha() * (out["loss"]["gap"] - TAU)
    out["loss"]["weight"] = tape.gradient(loss, agent._log_cql_alpha).numpy()
    return out


def record(agent, name, draws, key):
    method = getattr(agent, name)

    def recorded(*arguments, **options):
        draws[key] = method(*arguments, **options)
        return draws[key]

    setattr(agent, name, recorded)


def bc(rng, spec, network):
    agent = BehavioralCloningAgent(TIME_STEPS, spec, cloning_network=network, optimizer=tf.keras.optimizers.SGD(0.1))
    agent.initialize()
    shake((network,), 8)
    size = (ROWS, *spec.shape)
    action = rng.integers(4, size=size) if spec is DISCRETE else rng.normal(size=size).astype(np.float32).clip(-1, 1)
    batch = make_batch(rng, action)
    there = trajectory.Trajectory(
        step_type=tf.fill([ROWS], ts.StepType.MID),
        observation=tf.constant(batch["obs"]),
        action=tf.constant(action),
        policy_info=(),
        next_step_type=tf.fill([ROWS], ts.StepType.MID),
        reward=tf.constant(batch["reward"]),
        discount=tf.constant(batch["discount"]),
    )
    names = ("hidden/kernel", "hidden/bias", "out/kernel", "out/bias")
    found = dict(zip(names, network.trainable_variables, strict=True))
    loss, gradients = gradient(lambda: agent._loss(there, weights=None, training=True).loss, found)
    return {"batch": batch, "weights": values(found), "loss": loss, "gradient": gradients}


def main(path):
    rng = np.random.default_rng(0)
    mean = ActorNetwork(OBS_SPEC, BOX, fc_layer_params=(HIDDEN,), activation_fn=tf.keras.activations.tanh)
    logits = QNetwork(OBS_SPEC, DISCRETE, fc_layer_params=(HIDDEN,), activation_fn=tf.keras.activations.tanh)
    cases = {"cql": cql(rng, False), "cql_entropy": cql(rng, True)}
    cases |= {"bc_box": bc(rng, BOX, mean), "bc_discrete": bc(rng, DISCRETE, logits)}
    settings = {"gamma": GAMMA, "cql_alpha": CQL_ALPHA, "tau": TAU, "log_alpha": -0.4, "version": tf_agents.__version__}
    arrays = {name.lstrip("/"): x for name, x in flatten(cases | settings, "").items()}
    np.savez_compressed(path, **arrays)
    print(f"{path}: {len(arrays)} arrays of TF-Agents {tf_agents.__version__}")


if __name__ == "__main__":
    main(sys.argv[1])
