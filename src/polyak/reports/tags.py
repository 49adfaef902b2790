"""The metrics of a report: their groups, their order, and a sentence each on what a healthy curve looks like."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from polyak.core.tags import RETURN

EVAL_RETURN = "eval/mean_reward"


@dataclass(frozen=True)
class TagGroup:
    """Metrics that belong together.

    Attributes:
        name: title of the group.
        healthy: a sentence for each tag, in the order of the page.
        pattern: further tags that the group takes.
    """

    name: str
    healthy: dict[str, str]
    pattern: str = r"(?!)"


GROUPS = (
    TagGroup(
        "Learning",
        {
            RETURN: "Healthy: it rises, with noise, and then stays; a random policy shows what no learning looks like.",
            EVAL_RETURN: "Healthy: at or above the training return, as the greedy policy does not explore.",
            "rollout/success_rate": "Healthy: it rises towards 1, often long after the return.",
            "eval/success_rate": "Healthy: it rises towards 1 with the return.",
            "rollout/ep_len_mean": "Healthy: longer where an episode is survival, shorter where it is a race.",
            "eval/mean_ep_length": "Healthy: like the length of the training's episodes; a constant maximum is the time limit.",
            "rollout/ep_agent_rew_mean": "The return that the agent sees; healthy: it rises together with the environment's.",
        },
        r"(rollout|eval|env)/",
    ),
    TagGroup(
        "Policy",
        {
            "train/entropy_loss": "Minus the entropy. Healthy: it rises slowly; 0 within few updates ends exploration.",
            "train/entropy": "Healthy: it falls slowly to the target entropy; near 0 at once means no exploration is left.",
            "train/approx_kl": "Healthy: between 0.001 and 0.02; above 0.1 updates are too large, below 1e-5 too small.",
            "train/kl": "Healthy: between 0.001 and 0.02 for a whole update, falling with the learning rate.",
            "train/clip_fraction": "Healthy: below 0.3; above 0.4 updates are too large.",
            "train/ratio": "Healthy: close to 1.",
            "train/kl_beta": "Healthy: it settles where the KL divergence meets its target.",
            "rollout/exploration_rate": "The ε of its schedule.",
            "train/alpha": "Healthy: it falls and settles; growth without end means the target entropy cannot be reached.",
        },
    ),
    TagGroup(
        "Values",
        {
            "train/explained_variance": "Healthy: it nears 1; at 0 the critic learns nothing, below 0 less than that.",
            "train/q": "Healthy: it settles below the largest possible return; growth beyond it is divergence.",
            "train/td_error": "Healthy: it falls and settles; tiny from the start, the target never moves.",
        },
    ),
    TagGroup(
        "Intrinsic reward",
        {
            "train/intrinsic_reward": "Healthy: it falls as the environment becomes known; what is new raises it.",
            "train/intrinsic_return_std": "The standard deviation that intrinsic rewards are divided by.",
            "train/intrinsic_error_std": "The standard deviation that the predictor's errors are divided by.",
            "train/intrinsic_q": "Healthy: it falls with the intrinsic reward.",
            "train/intrinsic_stats": "Healthy: 1 after the first updates; at 0 there are no intrinsic rewards.",
            "train/intrinsic_skipped_steps": "Healthy: 0; it counts gradient steps that NaN or infinity made impossible.",
            "train/predictor_loss": "Healthy: it falls as the environment becomes known.",
            "train/intrinsic_value_loss": "Healthy: it falls and settles.",
        },
    ),
    TagGroup(
        "Losses",
        {
            "train/loss": "Not a sign of learning by itself: look for jumps and for growth without end.",
            "train/policy_gradient_loss": "Healthy: small and noisy around a constant.",
            "train/value_loss": "Healthy: it grows with the return and then falls; it scales with the square of rewards.",
            "train/critic_loss": "Healthy: it grows with the return at first and then falls or settles.",
            "train/actor_loss": "Healthy: minus the value, so it falls while the return rises.",
            "train/alpha_loss": "Healthy: around 0 once the entropy is at its target.",
        },
        r"train/.*_loss$",
    ),
    TagGroup(
        "Gradients",
        {
            "train/grad_norm": "Healthy: up to some 10 times max_grad_norm; at thousands, rewards or inputs are too large.",
            "train/grad_norm_clipped": "The norm after clipping: at most max_grad_norm.",
            "train/learning_rate": "The learning rate of its schedule.",
            "train/clip_range": "The clip range of its schedule.",
            "train/n_updates": "Gradient steps so far. Healthy: a straight line; 0 means that learning has not started.",
            "train/resets": "Resets of the networks so far. Healthy: the return falls at each, and recovers soon.",
            "train/skipped_steps": "Healthy: 0; it counts gradient steps that NaN or infinity made impossible.",
        },
        r"train/",
    ),
    TagGroup(
        "Replay",
        {
            "replay/size": "Healthy: it grows to the capacity and stays.",
            "replay/dropped": "Healthy: 0; it counts transitions with NaN or infinity, which are not stored.",
        },
        r"replay/",
    ),
    TagGroup(
        "Workers",
        {
            "workers/idle_share": "Healthy: low; above 0.5 the learner is the bottleneck, so more workers bring nothing.",
            "workers/alive": "Healthy: constant.",
            "workers/restarts": "Healthy: 0; it counts workers that crashed, hung or lost their connection.",
            "staleness/mean": "Healthy: below 2; old policies make gradients wrong.",
        },
        r"(workers|staleness|rollouts)/",
    ),
    TagGroup(
        "Speed",
        {
            "time/fps": "Healthy: constant after the first reports; a slow decline means a leak or a busy machine.",
            "time/collect": "Seconds that a rollout takes in a worker.",
            "time/update": "Seconds per iteration in which the learner learns.",
            "time/wait": "Seconds per iteration in which the learner waits for workers; healthy: near 0.",
        },
    ),
    TagGroup("Other metrics", {}, r""),
)

CLOCKS = ("env_steps", "time/time_elapsed", "time/total_timesteps", "time/iterations")
"""Axes and counters, which say nothing as curves."""

HIDDEN = (*CLOCKS, "train/nonfinite_source", "train/consecutive_skipped_updates")
"""Tags without a chart; the warnings use the last two."""

DETAILS = "train/last_epoch/"
"""Prefix of the metrics of the last epoch alone, which repeat the others."""


def group_tags(tags: Iterable[str]) -> list[tuple[TagGroup, list[str]]]:
    """Sort tags into the groups of the page; groups without a tag are left out."""
    rest = [tag for tag in sorted(tags) if tag not in HIDDEN and not tag.startswith(DETAILS)]
    named = {tag for group in GROUPS for tag in group.healthy}
    result = []
    for group in GROUPS:
        known = [tag for tag in group.healthy if tag in rest]
        others = [tag for tag in rest if tag not in named and re.match(group.pattern, tag)]
        rest = [tag for tag in rest if tag not in (*known, *others)]
        if known or others:
            result.append((group, known + others))
    return result


def healthy_curve(tag: str) -> str:
    """Return the sentence on a tag, "" for an unknown one; `train/critic_grad_norm` has the sentence of `train/grad_norm`."""
    sentences = {name: sentence for group in GROUPS for name, sentence in group.healthy.items()}
    if tag not in sentences and tag.endswith("grad_norm"):
        return sentences["train/grad_norm"]
    return sentences.get(tag, "")
