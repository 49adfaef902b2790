"""What one PPO update is measured on, and how TF-Agents and Stable-Baselines3 are made to compute it; see `ppo_update.py`."""

import tempfile
from collections.abc import Callable
from typing import Any

from harness import Pace

NUM_ENVS, NUM_STEPS, OBS, ACTIONS, EPOCHS = 8, 256, 17, 6, 10
SHARED = {"learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5}


def synthetic(num_steps: int = NUM_STEPS, num_envs: int = NUM_ENVS) -> dict[str, Any]:
    """A stream of noise: `[T+1, B]` observations, rewards and flags, `[T, B]` actions; some episodes end, and then reset."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (num_steps + 1, num_envs)
    terminated = rng.random(shape) < 0.01
    terminated[0] = False
    for t in range(1, num_steps + 1):
        terminated[t] &= ~terminated[t - 1]
    first = np.concatenate([np.ones((1, num_envs), bool), terminated[:-1]])
    return {
        "obs": rng.normal(size=(*shape, OBS)).astype(np.float32),
        "actions": rng.normal(size=(num_steps, num_envs, ACTIONS)).astype(np.float32),
        "reward": np.where(first, 0, rng.normal(size=shape)).astype(np.float32),
        "terminated": terminated,
        "first": first,
    }


def tf_agents_worker(minibatches: int, updates: int, *, learner: bool, one_thread: bool) -> None:
    import tensorflow as tf
    import tf_agents

    if one_thread:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    agent = tf_agents_agent(minibatches)
    experience = trajectory_of(agent)
    if learner:
        update = learner_update(agent, experience, minibatches)
    elif minibatches == 1:
        train = tf.function(agent.train)
        update = lambda: train(experience)  # noqa: E731
    else:
        update = looped_update(agent, experience, minibatches)
    pace = Pace(tf_agents=tf_agents.__version__, tensorflow=tf.__version__)
    update()
    done = 0
    while True:
        for _ in range(updates):
            assert tf.math.is_finite(update().loss)
        done += updates
        pace.lap(done)


def tf_agents_agent(minibatches: int) -> Any:
    import tensorflow as tf
    from tf_agents.agents.ppo import ppo_actor_network, ppo_clip_agent
    from tf_agents.networks import value_network
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import time_step

    obs_spec = tensor_spec.TensorSpec((OBS,), tf.float32)
    action_spec = tensor_spec.BoundedTensorSpec((ACTIONS,), tf.float32, -1.0, 1.0)
    actor = ppo_actor_network.PPOActorNetwork().create_sequential_actor_net((64, 64), action_spec)
    agent = ppo_clip_agent.PPOClipAgent(
        time_step.time_step_spec(obs_spec),
        action_spec,
        # Its newer optimizer is slower here.
        optimizer=tf.keras.optimizers.legacy.Adam(SHARED["learning_rate"], epsilon=1e-5),
        actor_net=actor,
        value_net=value_network.ValueNetwork(obs_spec, fc_layer_params=(64, 64), activation_fn=tf.keras.activations.tanh),
        importance_ratio_clipping=SHARED["clip_range"],
        lambda_value=SHARED["gae_lambda"],
        discount_factor=SHARED["gamma"],
        value_pred_loss_coef=SHARED["vf_coef"],
        gradient_clipping=0.5,
        use_gae=True,
        use_td_lambda_return=True,
        normalize_rewards=False,
        normalize_observations=False,
        num_epochs=EPOCHS if minibatches == 1 else 1,
        compute_value_and_advantage_in_train=minibatches == 1,
        update_normalizers_in_train=minibatches == 1,
        train_step_counter=tf.Variable(0, dtype=tf.int64),
    )
    agent.initialize()
    return agent


def trajectory_of(agent: Any) -> Any:
    """The synthetic rollout as TF-Agents stores it, `[B, T+1]`, with what its policy says of it; the last step is padding."""
    import numpy as np
    import tensorflow as tf
    from tf_agents.trajectories import time_step, trajectory

    data = synthetic()
    step_type = np.where(data["first"], 0, np.where(data["terminated"], 2, 1)).astype(np.int32)
    by_env = lambda x: tf.constant(np.swapaxes(x, 0, 1))  # noqa: E731
    shifted = lambda x: by_env(np.concatenate([x[1:], x[-1:]]))  # noqa: E731
    obs = by_env(data["obs"])
    steps = time_step.TimeStep(by_env(step_type), by_env(data["reward"]), tf.ones(step_type.T.shape), obs)
    info = dict(agent.collect_policy.distribution(steps, ()).info)
    if "value_prediction" in agent.collect_data_spec.policy_info:
        info["value_prediction"] = agent.collect_policy.apply_value_network(obs, steps.step_type, value_state=())[0]
    return trajectory.Trajectory(
        step_type=steps.step_type,
        observation=obs,
        action=by_env(np.concatenate([data["actions"], data["actions"][-1:]])),
        policy_info=info,
        next_step_type=shifted(step_type),
        reward=shifted(data["reward"]),
        discount=shifted((~data["terminated"]).astype(np.float32)),
    )


def looped_update(agent: Any, experience: Any, minibatches: int) -> Callable[[], Any]:
    """All gradient steps of an update in one function: shuffled rows, `[M, 1]` at a time."""
    import tensorflow as tf

    rows, size = NUM_ENVS * NUM_STEPS, NUM_ENVS * NUM_STEPS // minibatches
    train = tf.autograph.experimental.do_not_convert(agent.train)

    @tf.function  # type: ignore[untyped-decorator]
    def update() -> Any:
        whole = agent.preprocess_sequence(experience)
        flat = tf.nest.map_structure(lambda x: tf.reshape(x[:, :-1], [rows, 1, *x.shape[2:]]), whole)
        orders = tf.reshape(tf.map_fn(lambda _: tf.random.shuffle(tf.range(rows)), tf.range(EPOCHS)), [-1, size])
        part = lambda i: tf.nest.map_structure(lambda x: tf.gather(x, orders[i]), flat)  # noqa: E731
        found = train(part(0))
        for i in tf.range(1, EPOCHS * minibatches):
            found = train(part(i))
        return found

    return update


def learner_update(agent: Any, experience: Any, minibatches: int) -> Callable[[], Any]:
    """`PPOLearner.run` over an endless dataset of the one rollout."""
    import tensorflow as tf
    from tf_agents.train import ppo_learner

    # Its minibatches are of stored steps, so the padding, which has no return, stays outside.
    whole = tf.nest.map_structure(lambda x: x[:, :-1], agent.preprocess_sequence(experience))
    dataset = lambda: tf.data.Dataset.from_tensors((whole, ())).repeat()  # noqa: E731
    learner = ppo_learner.PPOLearner(
        tempfile.mkdtemp(),
        agent.train_step_counter,
        agent,
        experience_dataset_fn=dataset,
        normalization_dataset_fn=dataset,
        num_samples=1,
        num_epochs=EPOCHS,
        minibatch_size=NUM_ENVS * NUM_STEPS // minibatches,
        shuffle_buffer_size=NUM_ENVS * NUM_STEPS,
        checkpoint_interval=-1,
        summary_interval=0,
    )
    return lambda: learner.run()


def sb3_worker(minibatches: int, updates: int) -> None:
    import stable_baselines3
    import torch
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv

    # One thread is faster than two on networks this small, so it gets one.
    torch.set_num_threads(1)
    pace = Pace(stable_baselines3=stable_baselines3.__version__, torch=torch.__version__)
    model = stable_baselines3.PPO(
        "MlpPolicy",
        DummyVecEnv([environment] * NUM_ENVS),
        n_steps=NUM_STEPS,
        batch_size=NUM_ENVS * NUM_STEPS // minibatches,
        n_epochs=EPOCHS,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": [64, 64]},
        device="cpu",
        seed=0,
        **SHARED,
    )
    model.set_logger(Logger(None, []))
    fill(model)
    done = 0
    while True:
        for _ in range(updates):
            model.train()
        done += updates
        pace.lap(done)


def fill(model: Any) -> None:
    """Put the synthetic rollout into Stable-Baselines3's buffer, as its `collect_rollouts` does."""
    import numpy as np
    import torch

    data = synthetic()
    with torch.no_grad():
        for t in range(NUM_STEPS):
            obs, actions = data["obs"][t], data["actions"][t]
            values, log_probs, _ = model.policy.evaluate_actions(torch.as_tensor(obs), torch.as_tensor(actions))
            starts = data["first"][t].astype(np.float32)
            model.rollout_buffer.add(obs, actions, data["reward"][t + 1], starts, values, log_probs)
        last_values = model.policy.predict_values(torch.as_tensor(data["obs"][-1]))
    model.rollout_buffer.compute_returns_and_advantage(last_values, dones=data["first"][-1].astype(np.float32))


def environment() -> Any:
    """A Gymnasium environment of those shapes in which nothing happens."""
    import gymnasium as gym
    import numpy as np

    unbounded = np.full(OBS, np.inf, np.float32)

    class Still(gym.Env):  # type: ignore[misc]
        observation_space = gym.spaces.Box(-unbounded, unbounded)
        action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return np.zeros(OBS, np.float32), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return np.zeros(OBS, np.float32), 0.0, False, False, {}

    return Still()
