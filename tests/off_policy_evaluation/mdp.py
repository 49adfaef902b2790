"""A small MDP whose values are known: policies in it, episodes, and the solution of its linear equations."""

import jax.numpy as jnp
import numpy as np

import polyak
from polyak.core.spaces import Discrete, EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import PolicyStep
from polyak.ops.distributions import Categorical

STATES, ACTIONS, GAMMA = 4, 3, 0.9
SPEC = EnvSpec(Discrete(STATES), Discrete(ACTIONS), id="mdp")

_rng = np.random.default_rng(5)
# P(s'|s, a); the last column is the end of the episode.
TRANSITION = np.concatenate(
    [0.8 * _rng.dirichlet(np.full(STATES, 0.6), (STATES, ACTIONS)), np.full((STATES, ACTIONS, 1), 0.2)], axis=2
)
REWARD = _rng.uniform(0.0, 2.0, (STATES, ACTIONS))
START = np.array([0.5, 0.3, 0.2, 0.0])
# The policy prefers the actions that pay more, and the behavior those that pay less.
TARGET = np.exp(0.8 * REWARD) / np.exp(0.8 * REWARD).sum(axis=1, keepdims=True)
BEHAVIOR = np.exp(-0.3 * REWARD) / np.exp(-0.3 * REWARD).sum(axis=1, keepdims=True)


@struct
class Table:
    """A policy by a table of probabilities."""

    probability: object
    spec: EnvSpec = static(default=SPEC)

    def initial_state(self, batch_size):
        return ()

    def distribution(self, time_step, carry=()):
        return Categorical(jnp.log(jnp.asarray(self.probability, jnp.float32))[jnp.asarray(time_step.obs)]), carry

    def action(self, time_step, carry, key):
        return PolicyStep(self.distribution(time_step)[0].sample(seed=key), carry)


def solve(probability, gamma=GAMMA, horizon=None):
    """Q `[S, A]` and V(s_0) of a policy; of episodes of at most `horizon` steps, or without a limit."""
    following = np.einsum("sat,tb->satb", TRANSITION[:, :, :STATES], probability).reshape(STATES * ACTIONS, -1)
    reward = REWARD.reshape(-1)
    if horizon is None:
        q = np.linalg.solve(np.eye(STATES * ACTIONS) - gamma * following, reward)
    else:
        q = np.zeros(STATES * ACTIONS)
        for _ in range(horizon):
            q = reward + gamma * following @ q
    q = q.reshape(STATES, ACTIONS)
    return q, float(START @ (probability * q).sum(axis=1))


def play(probability, episodes, rng, horizon=200):
    """Episodes of a policy, as arrays that `polyak.data.load` takes."""
    state = rng.choice(STATES, episodes, p=START)
    alive, rows = np.ones(episodes, bool), []
    for t in range(horizon):
        action = _choose(rng, probability[state])
        after = _choose(rng, TRANSITION[state, action])
        ended = after == STATES
        after = np.where(ended, 0, after)
        rows.append(
            (alive.copy(), state, action, REWARD[state, action], ended, np.full(episodes, t == horizon - 1) & ~ended, after)
        )
        state, alive = after, alive & ~ended
        if not alive.any():
            break
    used, *columns = (np.stack(x, axis=1) for x in zip(*rows, strict=True))
    names = ("observations", "actions", "rewards", "terminations", "truncations", "next_observations")
    arrays = {name: column[used] for name, column in zip(names, columns, strict=True)}
    arrays["log_probs"] = np.log(probability[arrays["observations"], arrays["actions"]])
    return arrays


def load(arrays, *leave_out):
    return polyak.data.load({name: x for name, x in arrays.items() if name not in leave_out}, spec=SPEC)


def _choose(rng, probability):
    return (rng.random((len(probability), 1)) > np.cumsum(probability, axis=1)[:, :-1]).sum(axis=1)
