"""Writes models to `stable_baselines_models/`: `python tests/importers/stable_baselines_models.py [NAME ...]`.

It needs Stable-Baselines3. Never run by the tests, which need neither Stable-Baselines3 nor PyTorch.
"""

import json
import sys
import zipfile
from pathlib import Path

import gymnasium
import numpy as np

FOLDER = Path(__file__).with_suffix("")
NUM_OBS = 1000


def observations(size):
    """The observations on which the models and polyak's policies of them are compared."""
    return np.random.default_rng(0).normal(0.0, 2.0, (NUM_OBS, size)).astype(np.float32)


class TwoActions(gymnasium.Env):
    """Random observations, and actions of two numbers with bounds of their own."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (3,))
    action_space = gymnasium.spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action):
        return (
            self.np_random.normal(size=3).astype(np.float32),
            float(action[0]),
            bool(self.np_random.random() < 0.1),
            False,
            {},
        )


def shrink(path):
    """Remove the optimizer, and the pickles that hold paths of the machine."""
    with zipfile.ZipFile(path) as model:
        settings, weights = json.loads(model.read("data")), model.read("policy.pth")
    settings = {
        name: {key: x for key, x in value.items() if key != ":serialized:"} if isinstance(value, dict) else value
        for name, value in settings.items()
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as model:
        model.writestr("data", json.dumps(settings, indent=4))
        model.writestr("policy.pth", weights)


def tasks():
    """The algorithm, the environment or its name, the networks and other arguments of each model."""
    import torch
    from stable_baselines3 import PPO, SAC, TD3

    pendulum, replay = "Pendulum-v1", {"learning_starts": 50, "batch_size": 16}
    of_critic = {"qf": [4]}
    return {
        "discrete": (PPO, "CartPole-v1", {"net_arch": {"pi": [16], "vf": [12, 8]}}, {"n_steps": 64}),
        "box": (
            PPO,
            pendulum,
            {"net_arch": [12, 12], "activation_fn": torch.nn.ReLU, "log_std_init": -0.5},
            {"n_steps": 64},
        ),
        "sde": (PPO, pendulum, {"net_arch": [6], "log_std_init": -0.5}, {"n_steps": 64, "use_sde": True}),
        "sde_squashed": (
            PPO,
            TwoActions,
            {"net_arch": [6], "log_std_init": 0.1, "full_std": False, "use_expln": True, "squash_output": True},
            {"n_steps": 64, "use_sde": True},
        ),
        "sac": (SAC, pendulum, {"net_arch": {"pi": [8, 6], **of_critic}}, replay),
        "sac_sde": (SAC, pendulum, {"net_arch": {"pi": [8, 6], **of_critic}}, {**replay, "use_sde": True}),
        "td3": (TD3, pendulum, {"net_arch": {"pi": [8, 6], **of_critic}, "activation_fn": torch.nn.Tanh}, replay),
    }


def distribution_of(model, obs):
    """The distribution of the actions, before a tanh."""
    import torch

    policy, obs = model.policy, torch.as_tensor(obs)
    if not hasattr(policy, "actor"):
        return policy.get_distribution(obs).distribution
    mean, log_std, more = policy.actor.get_action_dist_params(obs)
    return policy.actor.action_dist.proba_distribution(mean, log_std, **more).distribution


def enlarge(model):
    """Weights larger than trained ones, so that the action depends on the observation, and its standard deviation too."""
    import torch

    policy = model.policy
    head = policy.actor.mu if hasattr(policy, "actor") else policy.action_net
    with torch.no_grad():
        last = [module for module in head.modules() if isinstance(module, torch.nn.Linear)][-1]
        last.weight.normal_(0.0, 3.0 if hasattr(policy, "actor") else 1.0)
        for name, parameter in policy.named_parameters():
            if "log_std" in name and parameter.ndim == 2:
                parameter.add_(0.3 * torch.randn_like(parameter))


def main(names):
    import torch

    FOLDER.mkdir(exist_ok=True)
    for name, (algorithm, env_id, policy_kwargs, arguments) in tasks().items():
        if names and name not in names:
            continue
        env = gymnasium.make(env_id) if isinstance(env_id, str) else env_id()
        model = algorithm("MlpPolicy", env, policy_kwargs=policy_kwargs, seed=0, device="cpu", **arguments)
        model.learn(128 if "batch_size" in arguments else 256)
        enlarge(model)
        model.save(FOLDER / f"{name}.zip")
        shrink(FOLDER / f"{name}.zip")
        obs = observations(env.observation_space.shape[0])
        actions, _ = model.predict(obs, deterministic=True)
        np.save(FOLDER / f"{name}.npy", actions.astype(np.int8 if name == "discrete" else np.float32))
        if name in ("sde", "sde_squashed", "sac", "sac_sde"):
            with torch.no_grad():
                np.save(FOLDER / f"{name}_std.npy", distribution_of(model, obs).stddev.numpy())


if __name__ == "__main__":
    main(sys.argv[1:])
