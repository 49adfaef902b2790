"""Writes the models of `stable_baselines_models/`: `python tests/policies/stable_baselines_models.py`, with Stable-Baselines3.

Never run by the tests, which need neither Stable-Baselines3 nor PyTorch.
"""

import json
import zipfile
from pathlib import Path

import gymnasium
import numpy as np

FOLDER = Path(__file__).with_suffix("")
NUM_OBS = 1000


def observations(size):
    """The observations on which the models and polyak's policies of them are compared."""
    return np.random.default_rng(0).normal(0.0, 2.0, (NUM_OBS, size)).astype(np.float32)


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


def main():
    import torch
    from stable_baselines3 import PPO

    FOLDER.mkdir(exist_ok=True)
    tasks = {
        "discrete": ("CartPole-v1", {"net_arch": {"pi": [16], "vf": [12, 8]}}),
        "box": ("Pendulum-v1", {"net_arch": [12, 12], "activation_fn": torch.nn.ReLU, "log_std_init": -0.5}),
        "sde": ("Pendulum-v1", {"net_arch": [4]}),
    }
    for name, (env_id, policy_kwargs) in tasks.items():
        env = gymnasium.make(env_id)
        model = PPO("MlpPolicy", env, n_steps=64, policy_kwargs=policy_kwargs, use_sde=name == "sde", seed=0, device="cpu")
        model.learn(256)
        with torch.no_grad():
            # Larger than trained weights, so that the greedy action depends on the observation.
            model.policy.action_net.weight.normal_(0.0, 1.0)
        model.save(FOLDER / f"{name}.zip")
        shrink(FOLDER / f"{name}.zip")
        actions, _ = model.predict(observations(env.observation_space.shape[0]), deterministic=True)
        np.save(FOLDER / f"{name}.npy", actions.astype(np.int8 if name == "discrete" else np.float32))


if __name__ == "__main__":
    main()
