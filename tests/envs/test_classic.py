"""The JAX dynamics against Gymnasium's, over whole episodes, and the starts."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from polyak.core.gymnasium_spaces import from_gymnasium
from polyak.envs.classic import (
    DYNAMICS,
    Acrobot,
    AcrobotState,
    CartPole,
    CartPoleState,
    MountainCar,
    MountainCarState,
    Pendulum,
    PendulumState,
    uniform,
)

KEY = jax.random.key(0)
STATES = {
    "CartPole-v1": CartPoleState,
    "Pendulum-v1": PendulumState,
    "Acrobot-v1": AcrobotState,
    "MountainCar-v0": MountainCarState,
}


def packed(name, states, steps):
    """Gymnasium's states as ours, a row each."""
    columns = np.array(states, np.float64).T
    if name == "Pendulum-v1":
        columns[0] = (columns[0] + np.pi) % (2 * np.pi) - np.pi
    return STATES[name](*(jnp.asarray(x, jnp.float32) for x in columns), jnp.asarray(steps, jnp.int32))


def played(name, policy, seed):
    """One episode in Gymnasium: states, actions, and what each step answered."""
    env, rng = gymnasium.make(name), np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    states, actions, answers, over = [], [], [], False
    while not over:
        action = policy(obs, rng, env.action_space)
        states.append(np.array(env.unwrapped.state, np.float64))
        obs, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        answers.append((obs, reward, terminated, truncated))
        over = terminated or truncated
    return states, np.array(actions), tuple(np.array(column) for column in zip(*answers, strict=True))


def anyhow(obs, rng, space):
    """At random."""
    return rng.uniform(-2, 2, 1).astype(np.float32) if space.shape == (1,) else np.int32(rng.integers(space.n))


def balancing(obs, rng, space):
    """Keeps the pole up for the whole 500 steps."""
    return np.int32(3 * obs[2] + obs[3] + 0.3 * obs[0] + 0.5 * obs[1] > 0)


def pumping(obs, rng, space):
    """Pushes along with the velocity, which gets the car out."""
    return np.int32(2 if obs[1] >= 0 else 0)


def rocking(obs, rng, space):
    """Torque along with the first link, which swings up in the end."""
    return np.int32(2 if obs[4] < 0 else 0)


EPISODES = [
    ("CartPole-v1", anyhow, 12),
    ("CartPole-v1", balancing, 2),
    ("Pendulum-v1", anyhow, 4),
    ("Acrobot-v1", anyhow, 2),
    ("Acrobot-v1", rocking, 2),
    ("MountainCar-v0", anyhow, 2),
    ("MountainCar-v0", pumping, 3),
]


@pytest.mark.parametrize(("name", "policy", "episodes"), EPISODES)
def test_every_step_of_whole_episodes_is_gymnasiums_within_1e_5(name, policy, episodes):
    dynamics, recorded = DYNAMICS[name](), [played(name, policy, seed) for seed in range(episodes)]
    # All steps of all episodes as one batch, each from Gymnasium's own state.
    states, steps = np.concatenate([r[0] for r in recorded]), np.concatenate([np.arange(len(r[0])) for r in recorded])
    actions = np.concatenate([r[1] for r in recorded])
    obs, reward, terminated, truncated = (np.concatenate(column) for column in zip(*(r[2] for r in recorded), strict=True))
    step = jax.jit(lambda s, a: (dynamics.observe(dynamics.step(s, a, KEY)[0]), dynamics.step(s, a, KEY)))
    our_obs, (after, *ours) = step(packed(name, states, steps), actions)
    np.testing.assert_allclose(our_obs, obs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours[0], reward, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(ours[1], terminated)
    np.testing.assert_array_equal(ours[2], truncated)
    np.testing.assert_array_equal(after.steps, steps + 1)
    ends = {balancing: truncated, pumping: terminated, rocking: terminated}
    assert policy is anyhow or ends[policy].any()


@pytest.mark.parametrize("name", ["CartPole-v1", "MountainCar-v0"])
def test_a_whole_episode_left_to_itself_stays_with_gymnasium(name):
    """Not the others: they are chaotic, and float32 parts from float64 after some seconds."""
    dynamics = DYNAMICS[name]()
    step, observe = jax.jit(dynamics.step), jax.jit(dynamics.observe)
    for seed in range(3):
        states, actions, (obs, *_, terminated, truncated) = played(name, anyhow, seed)
        ours = packed(name, states[:1], [0])
        for t, action in enumerate(actions):
            ours, _, our_terminated, our_truncated = step(ours, action[None], KEY)
            np.testing.assert_allclose(observe(ours)[0], obs[t], rtol=0, atol=1e-5)
            assert (bool(our_terminated[0]), bool(our_truncated[0])) == (terminated[t], truncated[t])


@pytest.mark.parametrize("name", list(DYNAMICS))
def test_the_spaces_are_gymnasiums(name):
    env, spec = gymnasium.make(name), DYNAMICS[name]().spec
    assert spec.obs == from_gymnasium(env.observation_space)
    assert spec.action == from_gymnasium(env.action_space)
    assert spec.id == f"jax/{name}"


@pytest.mark.parametrize(
    ("dynamics", "low", "high"),
    [
        (CartPole(), [-0.05] * 4, [0.05] * 4),
        (Pendulum(), [-np.pi, -1.0], [np.pi, 1.0]),
        (Acrobot(), [-0.1] * 4, [0.1] * 4),
        (MountainCar(), [-0.6, 0.0], [-0.4, 0.0]),
    ],
)
def test_episodes_start_where_gymnasiums_do(dynamics, low, high):
    *state, steps = jax.tree.leaves(dynamics.reset(jax.random.key(0), 2000))
    assert np.all(steps == 0)
    for values, a, b in zip(state, low, high, strict=True):
        assert values.dtype == np.float32
        if a == b:
            assert np.all(values == a)
        else:
            assert stats.kstest(np.asarray(values, np.float64), stats.uniform(a, b - a).cdf).pvalue > 1e-3
    pairs = np.corrcoef([np.asarray(v) for v in state if np.ptp(v) > 0])
    np.testing.assert_allclose(pairs, np.eye(len(pairs)) if pairs.ndim else 1.0, atol=0.1)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_uniform_is_uniform_over_positions_and_over_keys(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 512)
    draws = np.asarray(jax.vmap(lambda key: uniform(key, (4, 16), 0.0, 1.0))(keys), np.float64)
    assert draws.min() >= 0 and draws.max() < 1
    flat = draws.reshape(512, 64)
    assert stats.kstest(flat.ravel(), "uniform").pvalue > 1e-3
    # Each position over the keys, and neighbours in position or key, are independent.
    assert min(stats.kstest(column, "uniform").pvalue for column in flat.T) > 1e-5
    assert abs(np.corrcoef(flat[:, :-1].ravel(), flat[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(flat[:-1].ravel(), flat[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(flat)) > 0.99 * flat.size


def test_a_time_limit_of_ones_own_truncates():
    dynamics = CartPole(max_episode_steps=2)
    state = dynamics.reset(jax.random.key(0), 3)
    state, _, _, first = dynamics.step(state, jnp.zeros(3, jnp.int32), jax.random.key(0))
    _, _, terminated, second = dynamics.step(state, jnp.zeros(3, jnp.int32), jax.random.key(0))
    assert not first.any() and second.all() and not terminated.any()


@pytest.mark.parametrize("dynamics", list(DYNAMICS.values()))
def test_a_bad_time_limit_is_rejected(dynamics):
    with pytest.raises(ValueError, match="max_episode_steps must be an integer >= 1, got 0"):
        dynamics(max_episode_steps=0)
