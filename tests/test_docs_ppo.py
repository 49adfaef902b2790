"""The page about PPO: its programs run, its excerpts are the code's, and its tables name all there is."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

from polyak.agents.ppo import PPO

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "polyak"
PAGE = (ROOT / "docs" / "ppo.md").read_text()
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


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def column(heading, number):
    """All that stands in backquotes in one column of the table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[number] for line in section.splitlines() if line.startswith("| ")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_programs_run_one_after_another():
    names = {}
    for program in blocks("python"):
        exec(compile(program, "ppo.md", "exec"), names)
    assert names["penalty"].kl_target == 0.02


def test_excerpts_stand_in_the_code():
    code = "\n".join(re.sub(r"^ +", "", path.read_text(), flags=re.MULTILINE) for path in sorted(SOURCE.rglob("*.py")))
    assert blocks("py")
    for excerpt in blocks("py"):
        assert re.sub(r"^ +", "", excerpt, flags=re.MULTILINE) in code, excerpt


def test_every_function_stands_where_the_page_says():
    places = [line for line in PAGE.splitlines() if re.match(r"\| .* \| `\w+/\w+\.py`", line)]
    assert len(places) > 8
    for line in places:
        for path, names in re.findall(r"`(\w+/\w+)\.py`: ((?:`[\w.]+`(?:, )?)+)", line):
            module = importlib.import_module("polyak." + path.replace("/", "."))
            for name in re.findall(r"`([\w.]+)`", names):
                found = module
                for part in name.split("."):
                    found = getattr(found, part)


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert link.startswith("https://") or (ROOT / "docs" / link).exists(), link


def test_every_setting_is_on_the_page():
    missing = {name for name in FIELDS if not re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE)}
    assert not missing


def test_every_argument_of_tf_agents_is_in_its_table_and_leads_to_a_setting():
    assert set(TF_AGENTS.split()) <= column("Coming from TF-Agents", 1)
    beyond = {"axis_name", "update", "update(state, rollout, key, weights=...)"}
    assert column("Coming from TF-Agents", 2) - beyond - {"here"} <= FIELDS


def test_every_argument_of_stable_baselines3_is_in_its_table_and_leads_to_a_setting():
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    arguments = {name for name in inspect.signature(stable_baselines3.PPO).parameters if not name.startswith("_")}
    assert arguments <= column("Coming from Stable-Baselines3", 1)
    ours = {name.split("=")[0] for name in column("Coming from Stable-Baselines3", 2)}
    assert ours - {"key"} <= FIELDS
