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
    seen = {}

    def rule(obs):
        action = balance(obs) if batched else bool(balance(obs[None])[0])
        seen[name].append((obs, action))
        return action

    for name in ("jax/CartPole-v1", "CartPole-v1"):
        seen[name] = []
        env = polyak.envs.make(name, num_envs=2)
        policy = polyak.PythonPolicy(rule, env.spec, batched=batched, deterministic=True)
        assert polyak.train.evaluate(policy, env, episodes=2, key=KEY).mean_return == 500.0
    # What one loop asked, the other answers likewise.
    for name, pairs in seen.items():
        env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
        spec = env.spec
        policy = polyak.PythonPolicy(lambda obs: balance(obs), spec)
        for obs, action in pairs[:: len(pairs) // 5]:
            np.testing.assert_array_equal(policy.predict(obs)[0], np.asarray(action), err_msg=name)
