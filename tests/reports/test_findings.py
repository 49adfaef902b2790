"""Warnings of a report: each shape of docs/training-does-not-learn.md, and none for a healthy training."""

import numpy as np
import pytest

from polyak.reports.findings import Curve, find_faults

DISCRETE = {"spec": {"action": {"$class": "Discrete", "n": 2}}, "max_grad_norm": 0.5}
BOX = {"spec": {"action": {"$class": "Box"}}, "max_grad_norm": 0.5}
N = 40
RISING = np.linspace(10, 500, N)


def curves(**values):
    """Curves by tag, `train__kl` for `train/kl`; a healthy return unless another is given."""
    named = {"rollout__ep_rew_mean": RISING} | values
    found = {name.replace("__", "/"): np.asarray(value, float) for name, value in named.items() if value is not None}
    return {tag: Curve(100.0 * np.arange(1, len(value) + 1), value) for tag, value in found.items()}


HEALTHY = {
    "train__entropy_loss": np.linspace(-0.69, -0.2, N),
    "train__approx_kl": np.linspace(0.02, 0.005, N),
    "train__clip_fraction": np.full(N, 0.1),
    "train__explained_variance": np.linspace(0, 0.9, N),
    "train__grad_norm": np.full(N, 2.0),
    "train__q": np.linspace(0, 90, N),
    "train__alpha": np.linspace(1.0, 0.1, N),
    "train__skipped_steps": np.zeros(N),
    "train__n_updates": np.arange(N),
    "workers__restarts": np.zeros(N),
}


def test_a_healthy_training_has_no_warning():
    assert find_faults(curves(**HEALTHY), DISCRETE) == []


@pytest.mark.parametrize(
    ("values", "tag", "text"),
    [
        (
            {"train__skipped_steps": [0, 3], "train__nonfinite_source": [0, 2]},
            "train/skipped_steps",
            "3 gradient steps were skipped",
        ),
        ({"train__skipped_steps": [0, 3], "train__nonfinite_source": [0, 2]}, "train/skipped_steps", "was the reward."),
        ({"replay__dropped": [5]}, "replay/dropped", "5 transitions"),
        ({"workers__restarts": [0, 2]}, "workers/restarts", "2 workers crashed"),
        ({"workers__episodes_lost": [1]}, "workers/episodes_lost", "1 episodes were cut"),
        ({"rollouts__invalid": [4]}, "rollouts/invalid", "4 rollouts"),
        ({"train__n_updates": np.zeros(N)}, "train/n_updates", "No gradient step was taken"),
        ({"train__entropy_loss": [-0.6] * 10 + [0.0] * 30}, "train/entropy_loss", "The entropy is 0 from 1,100 env_steps on"),
        ({"train__entropy_loss": np.zeros(N)}, "train/entropy_loss", "The entropy is 0 from 0 env_steps on"),
        ({"train__approx_kl": np.full(N, 0.5)}, "train/approx_kl", "Updates are too large"),
        ({"train__approx_kl": np.full(N, 1e-6)}, "train/approx_kl", "Updates are too small"),
        ({"train__clip_fraction": np.full(N, 0.55)}, "train/clip_fraction", "55% of the samples are clipped"),
        ({"train__explained_variance": np.full(N, -0.5)}, "train/explained_variance", "worse than a constant"),
        ({"train__grad_norm": np.full(N, 3e4)}, "train/grad_norm", "It is 30,000, over 1,000 times max_grad_norm=0.5"),
        ({"train__critic_grad_norm": np.full(N, 3e4)}, "train/critic_grad_norm", "over 1,000 times"),
        ({"train__q": np.linspace(0, 1e5, N)}, "train/q", "Values reach 100,000, where the largest return is 500"),
        ({"train__alpha": np.geomspace(0.1, 100, N)}, "train/alpha", "It grew from 0.1 to 1e+02 and still grows"),
        (
            {"rollout__ep_rew_mean": [*RISING, *np.linspace(500, 30, N)]},
            "rollout/ep_rew_mean",
            "fell from 500.0 at 4,000 env_steps",
        ),
        ({"rollout__ep_rew_mean": None, "train__loss": [1]}, "rollout/ep_rew_mean", "No episode has ended"),
    ],
)
def test_each_fault_is_named(values, tag, text):
    found = [finding.text for finding in find_faults(curves(**values), DISCRETE) if finding.subject == tag]
    assert len(found) == 1 and text in found[0]


def test_faults_of_a_training_on_data_are_at_gradient_steps_and_it_has_no_episodes():
    falling = curves(rollout__ep_rew_mean=[*RISING, *np.linspace(500, 30, N)])
    assert "at 4,000 gradient steps" in find_faults(falling, DISCRETE, "gradient steps")[0].text
    assert find_faults(curves(rollout__ep_rew_mean=None, train__loss=[1]), DISCRETE, "gradient steps") == []


@pytest.mark.parametrize(
    ("values", "agent"),
    [
        # The entropy of a Gaussian has no lowest value.
        ({"train__entropy_loss": np.zeros(N)}, BOX),
        # Nearly equal returns leave no variance to explain.
        ({"rollout__ep_rew_mean": [*RISING, *[500.0] * 3 * N], "train__explained_variance": np.full(4 * N, -0.5)}, DISCRETE),
        # Rewards are scaled, and so are values.
        ({"train__q": np.linspace(0, 1e5, N)}, {"reward_scale": 100}),
        # A curve of few points has no shape, and a run without metrics no curves.
        ({"train__approx_kl": [0.5] * 3}, DISCRETE),
        ({"rollout__ep_rew_mean": None}, DISCRETE),
        ({"train__grad_norm": [1e9]}, {"max_grad_norm": None}),
    ],
)
def test_what_only_looks_like_a_fault_is_no_warning(values, agent):
    assert find_faults(curves(**values), agent) == []
