"""PPO against TF-Agents 0.19: every loss term and gradient of five small problems, step by step.

`reference/tf_agents_ppo.npz` holds their data, weights and results. TF-Agents divides by all entries of the padded batch where
we divide by those that count, and normalises advantages over the padding too; so the loss is compared on its normalised
advantages, with its divisor. Its GAE bootstraps from the wrong value; ours is compared with the right one,
`advantage_textbook`.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.agents.ppo_kl import PPOKL
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.learning.rollout_batch import Batch
from polyak.ops.gradient_step import clip_to_norm, global_norm
from polyak.ops.losses import adapt_kl_beta
from polyak.ops.normalize import RunningStats
from polyak.ops.returns import discounted_returns, gae

FILE = np.load(Path(__file__).parent / "reference" / "tf_agents_ppo.npz")
CASES = [name.removesuffix("/num_steps") for name in FILE.files if name.endswith("/num_steps")]
EVERY_CASE = pytest.mark.parametrize("case", CASES)
EVERY_STEP = pytest.mark.parametrize(
    ("case", "step"), [(case, k) for case in CASES for k in range(1, int(FILE[f"{case}/num_steps"]) + 1)]
)
NEAR = {"rtol": 1e-5, "atol": 1e-5}
MIDDLE, LAST = 1, 2


@dataclasses.dataclass(frozen=True)
class Net:
    """The networks of the reference: one tanh layer each, linear heads."""

    case: str
    box: bool
    squash_mean: bool

    def init(self, key, spec):
        return Variables(weights(self.case, 1), {})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        params = variables.params
        (out, value) = (_layers(params[name], obs) for name in ("actor", "value"))
        if self.box:
            scale = jax.nn.softplus(params["actor"]["std_bias"])
            loc = jnp.tanh(out) if self.squash_mean else out
            out = {"loc": loc, "log_scale": jnp.log(jnp.broadcast_to(scale[None], loc.shape))}
        return (out, value[:, 0]), carry, {}


def _layers(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"][None]


def weights(case, step):
    """Before this step, from 1."""
    prefix = f"{case}/w0/" if step == 1 else f"{case}/w/{step - 1}/"
    tree = {}
    for name in FILE.files:
        if name.startswith(prefix):
            *path, leaf = name.removeprefix(prefix).split("/")
            branch = tree
            for part in path:
                branch = branch.setdefault(part, {})
            branch[leaf] = jnp.asarray(FILE[name])
    return tree


class Problem:
    """One case of the file."""

    def __init__(self, case):
        self.case = case
        self.hyper = json.loads(str(FILE[f"{case}/hyper"]))
        self.box = self.hyper["dist"] == "normal"
        h = self.hyper
        obs = Box([-np.inf] * 3, [np.inf] * 3)
        self.spec = EnvSpec(obs, Box([-1.0] * 2, [1.0] * 2) if self.box else Discrete(self["in/old_logits"].shape[-1]))
        self.agent = PPOKL(
            self.spec,
            network=Net(case, self.box, h["squash_mean"]),
            gamma=h["gamma"],
            gae_lambda=h["lam"],
            clip_range=h["clip"] or None,
            clip_range_vf=h["value_clip"],
            clip_log_prob=h["log_prob_clip"] or None,
            ent_coef=h["entropy"],
            vf_coef=h["value_coef"],
            kl_beta=h["beta"] or None,
            kl_target=h["kl_target"] or 0.01,
            kl_tolerance=h["kl_tol"] if h["beta"] else 0.5,
            kl_cutoff_coef=h["kl_cutoff_coef"] or None,
            kl_cutoff_factor=h["kl_cutoff_factor"] or 2.0,
            max_grad_norm=h["grad_clip"],
        )

    def __getitem__(self, name):
        return FILE[f"{self.case}/{name}"]

    def stats(self, what, when):
        count, mean, m2 = (self[f"norm/{what}/{when}/{part}"] for part in ("count", "mean", "m2"))
        mean = jnp.asarray(mean, jnp.float32)
        return RunningStats(
            jnp.uint32(round(float(np.max(count)))), mean, jnp.zeros_like(mean), jnp.asarray(m2 / count, jnp.float32)
        )

    def obs(self, when="before"):
        obs = jnp.asarray(self["in/obs"])
        return self.stats("obs", when).normalize(obs, clip=5.0, epsilon=1e-3) if self.hyper["norm_obs"] else obs

    def batch(self, step, *, weight=None):
        """What the step's loss is computed from, with TF-Agents' normalised advantages."""
        old = {"loc": self["in/old_loc"], "log_scale": np.log(self["in/old_scale"])} if self.box else self["in/old_logits"]
        # With minibatches its statistics move before the epochs.
        data = (self.obs("after" if self.hyper["minibatch"] else "before"), self["in/action"], old)
        flat = jax.tree.map(lambda x: jnp.asarray(x).reshape(36, *x.shape[2:]), data)
        if self.hyper["minibatch"]:
            flat = jax.tree.map(lambda x: x[self["minibatch_index"][step - 1]], flat)
        names = ("old_log_prob", "old_value", "normalized_advantage", "return", "weight")
        log_prob, value, advantage, goal, its = (jnp.asarray(self[f"step/{step}/{name}"]).reshape(-1) for name in names)
        obs, action, old = flat
        its = its if weight is None else jnp.full_like(its, weight)
        return Batch(obs, action, None, old, log_prob, value, advantage, goal, its, None, ())


@functools.cache
def loss_gradient(case):
    """Gradient and terms of a batch, for all steps of the case one program."""
    problem = Problem(case)
    state = problem.agent.init(jax.random.key(0))
    if problem.hyper["kind"] == "kl":
        state = dataclasses.replace(state, kl_beta=jnp.float32(problem["beta_before"]))
    return jax.jit(lambda agent, params, batch: jax.grad(agent.loss, has_aux=True)(params, batch, state))


def tf_agents_gradient(problem, params, batch):
    """Gradient and terms with TF-Agents' divisor: all entries of the batch, so its weights sum to less than 1.

    Our penalties on the whole minibatch come in the share of its weights.
    """
    h = problem.hyper
    batch = dataclasses.replace(batch, weight=batch.weight / batch.weight.size)
    share = float(batch.weight.sum())
    agent = dataclasses.replace(problem.agent, l2_policy=h["policy_l2"] / share, l2_value=h["value_l2"] / share)
    gradient, aux = loss_gradient(problem.case)(agent, params, batch)
    terms = aux.terms
    if "kl_cutoff_loss" in terms:
        terms["kl_cutoff_loss"] /= share
    return gradient, terms


@EVERY_STEP
def test_every_loss_term_and_gradient_is_tf_agents(case, step):
    problem = Problem(case)
    h, tree = problem.hyper, weights(case, step)
    gradient, terms = tf_agents_gradient(problem, tree, problem.batch(step))
    _, everywhere = tf_agents_gradient(problem, tree, problem.batch(step, weight=1.0))
    penalties = [terms.get(name, 0.0) for name in ("l2_loss", "kl_penalty_loss", "kl_cutoff_loss")]
    loss = terms["policy_gradient_loss"] + h["value_coef"] * terms["value_loss"] + h["entropy"] * terms["entropy_loss"]
    got = {
        "policy_gradient_loss": terms["policy_gradient_loss"],
        "value_estimation_loss": h["value_coef"] * terms["value_loss"],
        "entropy_regularization_loss": h["entropy"] * terms["entropy_loss"],
        "l2_regularization_loss": terms.get("l2_loss", 0.0),
        "kl_penalty_loss": penalties[1] + penalties[2],
        "loss": loss + sum(penalties),
    }
    for name, value in got.items():
        np.testing.assert_allclose(value, problem[f"step/{step}/{name}"], err_msg=name, **NEAR)
    if h["clip"]:
        # This one it takes over the padding too.
        np.testing.assert_allclose(everywhere["clip_fraction"], problem[f"step/{step}/clip_fraction"], **NEAR)
    clipped = gradient if h["grad_clip"] is None else clip_to_norm(gradient, global_norm(gradient), h["grad_clip"])
    for path, leaf in jax.tree_util.tree_leaves_with_path(clipped):
        name = "/".join(key.key for key in path)
        np.testing.assert_allclose(leaf, problem[f"g/{step}/{name}"], err_msg=name, **NEAR)


@pytest.mark.parametrize("case", [case for case in CASES if Problem(case).hyper["value_in_train"]])
def test_values_and_log_probs_before_the_first_step_are_tf_agents(case):
    problem = Problem(case)
    model = problem.agent._model
    batch = dataclasses.replace(problem.batch(1), obs=problem.obs().reshape(36, -1))
    _, value = model.forward(Variables(weights(case, 1), {}), batch)
    np.testing.assert_allclose(value.reshape(4, 9), problem["value_preds"], **NEAR)
    batch = problem.batch(1)
    log_prob = model.distribution(batch.old_params, None).log_prob(batch.action)
    np.testing.assert_allclose(log_prob, batch.log_prob, **NEAR)


@EVERY_CASE
def test_rewards_are_scaled_as_by_tf_agents(case):
    problem = Problem(case)
    reward = jnp.asarray(problem["in/reward"])
    if problem.hyper["norm_rew"]:
        reward = reward / problem.stats("rew", "before").stddev(1e-3)
        if problem.hyper["rew_clip"]:
            reward = jnp.clip(reward, -problem.hyper["rew_clip"], problem.hyper["rew_clip"])
    np.testing.assert_allclose(reward[:, :8], problem["reward_used"], **NEAR)


@EVERY_CASE
def test_advantages_match_gae_and_returns_match_tf_agents(case):
    problem = Problem(case)
    # There a truncated step counts as terminated.
    ends = jnp.asarray(problem["in/next_step_type"] == LAST).T[:8]
    reward, value = jnp.asarray(problem["reward_used"]).T, jnp.asarray(problem["value_preds"]).T
    never = jnp.zeros_like(ends)
    settings = {"gamma": problem.hyper["gamma"], "gae_lambda": problem.hyper["lam"]}
    advantage = gae(reward, value[:-1], value[1:], ends, never, **settings)
    counts = np.asarray(problem["in/step_type"] != LAST).T[:8]
    np.testing.assert_allclose(advantage.T[counts.T], problem["advantage_textbook"][counts.T], **NEAR)
    if not problem.hyper["td_lambda_return"]:
        returns = discounted_returns(reward, value[1:], ends, never, gamma=settings["gamma"])
        np.testing.assert_allclose(returns.T[counts.T], problem["return"][counts.T], **NEAR)
    elif problem.hyper["rows"] == "closed":
        np.testing.assert_allclose((advantage + value[:-1]).T[counts.T], problem["return"][counts.T], **NEAR)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("kl")])
def test_beta_is_adapted_as_by_tf_agents(case):
    problem = Problem(case)
    h = problem.hyper
    mean_kl = jnp.float32(problem["kl_after"].mean())
    beta = adapt_kl_beta(jnp.float32(problem["beta_before"]), mean_kl, target=h["kl_target"], tolerance=h["kl_tol"])
    np.testing.assert_allclose(beta, problem["beta_after"], rtol=1e-6)


@pytest.mark.parametrize(
    ("case", "what"), [(c, w) for c in CASES for w in ("obs", "rew") if f"{c}/norm/{w}/after/count" in FILE]
)
def test_statistics_after_the_update_are_tf_agents(case, what):
    problem = Problem(case)
    data = problem["in/obs"] if what == "obs" else problem["in/reward"]
    stats = problem.stats(what, "before")
    after = problem.stats(what, "after")
    taken = int(after.count) - int(stats.count)
    columns = taken // 4
    rows = jnp.asarray(data[:, :columns]).reshape(-1, *data.shape[2:])
    moved = stats.update(rows, jnp.ones(rows.shape[0]))
    assert int(moved.count) == int(after.count)
    np.testing.assert_allclose(moved.mean, after.mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(moved.variance, after.variance, rtol=1e-6, atol=1e-7)


def test_the_losses_of_the_file_are_not_trivial():
    terms = {name.split("/")[-1] for name in FILE.files if "/step/1/" in name}
    assert {"policy_gradient_loss", "kl_penalty_loss", "l2_regularization_loss"} <= terms
    assert np.mean(np.abs(FILE["kl_normal_sgd/kl_after"])) > 1e-3
