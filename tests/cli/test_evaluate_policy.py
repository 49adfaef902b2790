"""polyak evaluate --policy: a person's rule in one table with the run's policy."""

import sys

import pytest

from polyak.envs.gymnasium import GymnasiumEnv

RULE = "import numpy as np\n\n\ndef lean(obs):\n    return (obs[:, 2] + 0.5 * obs[:, 3] > 0).astype(np.int32)\n\nNUMBER = 3\n"
MORE = '''
import polyak


class Counting:
    """Leans, and counts its steps."""

    def initial_state(self, batch_size):
        return {"steps": np.zeros(batch_size, np.int32)}

    def action(self, time_step, carry):
        return polyak.PolicyStep(lean(time_step.obs), {"steps": carry["steps"] + 1})


def failing(obs):
    raise ValueError("mine")


def ready(env):
    return polyak.PythonPolicy(lean, polyak.envs.make(env, num_envs=1).spec, name="ready")


counting, of_this, of_another = Counting(), ready("CartPole-v1"), ready("Acrobot-v1")
'''


@pytest.fixture
def rule(workdir, monkeypatch):
    """`rules_of_mine:lean`, a rule that balances the pole."""
    (workdir / "rules_of_mine.py").write_text(RULE + MORE)
    monkeypatch.delitem(sys.modules, "rules_of_mine", raising=False)
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


@pytest.mark.parametrize("name", ["counting", "of_this"])
def test_an_object_with_a_memory_and_a_ready_policy_are_taken(rule, run, command, name):
    code, out, err = command("evaluate run --episodes 1 --policy", f"rules_of_mine:{name}")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].split() == [f"rules_of_mine:{name}", "500.0", "0.0", "500.0", "1"]


def test_an_exception_of_a_policy_is_no_usage_error(rule, run, command):
    with pytest.raises(ValueError, match="mine") as caught:
        command("evaluate run --episodes 1 --policy rules_of_mine:failing")
    assert caught.traceback[-1].name == "failing"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("lean", "--policy must be module:name, got 'lean'"),
        ("rules_of_mine:", "--policy must be module:name, got 'rules_of_mine:'"),
        (":lean", "--policy must be module:name, got ':lean'"),
        ("rules_of_mine:lean.x", "--policy must be module:name"),
        ("rules_of_mine:of_another", "obs of the policy's spec is Box"),
        ("rules_of_mine:Counting", "give an instance, not the class Counting"),
        ("rules_of_mine:walk", "the module rules_of_mine has no 'walk'"),
        ("rules_of_yours:lean", "No module named 'rules_of_yours'; is it in this directory or on PYTHONPATH?"),
    ],
)
def test_a_name_that_is_no_policy_is_rejected(rule, run, command, policy, said):
    code, out, err = command("evaluate run --policy", policy)
    assert (code, out) == (2, "")
    assert said in err


def test_environments_are_closed_where_the_policy_is_rejected(rule, run, command, monkeypatch):
    made, closed = [], []
    initialize, close = GymnasiumEnv.__init__, GymnasiumEnv.close
    monkeypatch.setattr(GymnasiumEnv, "__init__", lambda env, *args, **options: made.append(initialize(env, *args, **options)))
    monkeypatch.setattr(GymnasiumEnv, "close", lambda env: closed.append(close(env)))
    code, _, _ = command("evaluate run --policy rules_of_yours:lean")
    assert code == 2 and len(made) == len(closed) == 1
