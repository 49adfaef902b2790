"""polyak evaluate --policy: a person's rule in one table with the run's policy."""

import pytest

RULE = "import numpy as np\n\n\ndef lean(obs):\n    return (obs[:, 2] + 0.5 * obs[:, 3] > 0).astype(np.int32)\n\nNUMBER = 3\n"


@pytest.fixture
def rule(workdir, monkeypatch):
    """`rules_of_mine:lean`, a rule that balances the pole."""
    (workdir / "rules_of_mine.py").write_text(RULE)
    monkeypatch.syspath_prepend(workdir)


def test_a_rule_and_the_runs_policy_stand_in_one_table(rule, run, command):
    code, out, err = command("evaluate run --episodes 3 --policy rules_of_mine:lean")
    assert (code, err) == (0, "")
    head, ours, theirs = out.splitlines()
    assert head.split() == ["CartPole-v1", "return", "±", "mean", "length", "episodes"]
    assert ours.startswith("ppo at 4") and theirs.split() == ["rules_of_mine:lean", "500.0", "0.0", "500.0", "3"]
    alone = command("evaluate run --episodes 3")[1]
    assert f"greedy return {ours.split()[-4]} ± {ours.split()[-3]} over 3 episodes" in alone
    assert len({len(line) for line in (head, ours, theirs)}) == 1


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("lean", "--policy must be module:name, got 'lean'"),
        ("rules_of_mine:", "--policy must be module:name, got 'rules_of_mine:'"),
        (":lean", "--policy must be module:name, got ':lean'"),
        ("rules_of_mine:lean.x", "--policy must be module:name"),
        ("rules_of_mine:walk", "the module rules_of_mine has no 'walk'"),
        ("rules_of_yours:lean", "No module named 'rules_of_yours'; is it on PYTHONPATH?"),
    ],
)
def test_F1_what_names_no_policy_is_refused(rule, run, command, policy, said):
    code, out, err = command("evaluate run --policy", policy)
    assert (code, out) == (2, "")
    assert said in err
