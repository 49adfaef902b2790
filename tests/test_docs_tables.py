"""Tables of the documentation: they name every setting and argument, and only names that exist."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import polyak
from polyak.agents.ppo import PPO
from polyak.copies import workers
from polyak.copies.network_copies import NetworkCopies

DOCS = Path(__file__).parent.parent / "docs"
PPO_PAGE = (DOCS / "ppo.md").read_text()
TF_AGENTS_PAGE = (DOCS / "tutorials" / "from-tf-agents.md").read_text()
STABLE_BASELINES3_PAGE = (DOCS / "tutorials" / "from-stable-baselines3.md").read_text()
COACH_PAGE = (DOCS / "tutorials" / "from-rl-coach.md").read_text()
COPIES_PAGE = (DOCS / "copies.md").read_text()
FIELDS = {field.name for field in dataclasses.fields(PPO)}

# The arguments of the constructors of PPOAgent, PPOClipAgent and PPOKLPenaltyAgent (which have no others), TF-Agents 0.19.
TF_AGENTS = """
    time_step_spec action_spec optimizer actor_net value_net greedy_eval importance_ratio_clipping lambda_value discount_factor
    entropy_regularization policy_l2_reg value_function_l2_reg shared_vars_l2_reg value_pred_loss_coef num_epochs use_gae
    use_td_lambda_return normalize_rewards reward_norm_clipping normalize_observations log_prob_clipping kl_cutoff_factor
    kl_cutoff_coef initial_adaptive_kl_beta adaptive_kl_target adaptive_kl_tolerance gradient_clipping value_clipping
    check_numerics compute_value_and_advantage_in_train update_normalizers_in_train aggregate_losses_across_replicas
    debug_summaries summarize_grads_and_vars train_step_counter name
"""


def column(page, heading, number):
    """All code spans in one column of the table under a heading."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[number] for line in section.splitlines() if line.startswith("| ")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_function_of_the_ppo_page_is_in_the_named_file():
    rows = [line for line in PPO_PAGE.splitlines() if re.match(r"\| .* \| `\w+/\w+\.py`", line)]
    assert len(rows) >= 5
    for row in rows:
        for path, names in re.findall(r"`(\w+/\w+)\.py`: ((?:`[\w.]+`(?:, )?)+)", row):
            module = importlib.import_module("polyak." + path.replace("/", "."))
            for name in re.findall(r"`([\w.]+)`", names):
                found = module
                for part in name.split("."):
                    found = getattr(found, part)


def test_every_setting_of_ppo_is_documented():
    pages = PPO_PAGE + TF_AGENTS_PAGE
    missing = {name for name in FIELDS if not re.search(rf"`[^`]*\b{name}\b[^`]*`", pages)}
    assert not missing


def test_every_argument_of_tf_agents_leads_to_a_setting():
    heading = "Every argument of PPOAgent"
    assert set(TF_AGENTS.split()) <= column(TF_AGENTS_PAGE, heading, 1)
    others = {"axis_name", "update", "update(state, rollout, key, weights=...)"}
    assert column(TF_AGENTS_PAGE, heading, 2) - others <= FIELDS


def test_every_argument_of_stable_baselines3_leads_to_a_setting():
    heading = "Every argument of PPO"
    ours = {name.split("=")[0] for name in column(STABLE_BASELINES3_PAGE, heading, 2)}
    assert ours - {"key"} <= FIELDS
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    arguments = {name for name in inspect.signature(stable_baselines3.PPO).parameters if not name.startswith("_")}
    assert arguments <= column(STABLE_BASELINES3_PAGE, heading, 1)


@pytest.mark.parametrize(
    ("page", "heading"),
    [(COACH_PAGE, "Verbs"), (COPIES_PAGE, "Coming from Optax"), (COPIES_PAGE, "Workers"), (COPIES_PAGE, "Gradients")],
)
def test_verbs_of_the_network_copies_exist(page, heading):
    ours = column(page, heading, 2 if heading in ("Verbs", "Coming from Optax") else 1)
    names = {found[1] for span in ours if (found := re.match(r"([a-z_]+)\(", span))}
    assert names
    for name in names - {"create"}:
        assert any(name in dir(owner) for owner in (polyak, NetworkCopies, workers)), name


def test_policies_of_the_tf_agents_table_exist():
    names = {name for name in column(TF_AGENTS_PAGE, "Policies", 2) if re.fullmatch(r"[A-Z]\w+", name)}
    assert {"Greedy", "EpsilonGreedy", "Boltzmann", "GaussianNoise", "OUNoise", "Uniform", "Scripted"} == names
    assert all(name in polyak.policies.__all__ for name in names)
