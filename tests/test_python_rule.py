"""A rule written by hand balances the pole, in the compiled loop and on Gymnasium's environment."""

import jax
import numpy as np
import pytest

import polyak

KEY = jax.random.key(0)


def balance(obs):
    """Push towards where the pole falls, and the cart back to the middle."""
    x, speed, angle, turning = obs.T
    return angle + 0.25 * turning + 0.02 * x + 0.05 * speed > 0


@pytest.mark.parametrize("batched", [True, False])
def test_a_rule_balances_the_pole_in_both_loops(batched):
    def rule(obs):
        return balance(obs) if batched else bool(balance(obs[None])[0])

    for name in ("jax/CartPole-v1", "CartPole-v1"):
        env = polyak.envs.make(name, num_envs=2)
        policy = polyak.PythonPolicy(rule, env.spec, batched=batched, deterministic=True)
        assert polyak.train.evaluate(policy, env, episodes=2, key=KEY).mean_return == 500.0
        # What each loop really did is what the rule says of what was really there.
        rollout = polyak.train.collect(policy, env, 30, key=KEY)
        wanted = [balance(obs) for obs in np.asarray(rollout.obs)]
        np.testing.assert_array_equal(rollout.actions, wanted, err_msg=name)
        assert 0 < np.mean(wanted) < 1
