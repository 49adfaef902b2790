"""Masks of MultiDiscrete actions and of trees: what environments hand out, what agents see, and what is refused."""

import functools

import gymnasium.spaces as gym
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

from polyak import envs, loops
from polyak.agents.ppo import PPO
from polyak.core.spaces import Discrete, MultiDiscrete, map_space
from polyak.envs.masks import mask_of_env, read_masks
from polyak.networks.feedforward import MLP
from tests.envs import toys

KINDS = list(toys.CHOICES)


class Through(VectorWrapper):
    """Changes nothing, but hides that there is a SyncVectorEnv, which we would step ourselves; or changes the masks."""

    def __init__(self, env, change=lambda masks: masks):
        super().__init__(env)
        self.change = change

    def step(self, actions):
        *answer, info = self.env.step(actions)
        return (*answer, info | {"action_mask": self.change(info["action_mask"])} if "action_mask" in info else info)


def sizes_of(leaf):
    return leaf.nvec if isinstance(leaf, MultiDiscrete) else (leaf.n,)


def expected(env, time_step):
    """What `toys.Choosy` allows, from the count that it observes; all where an episode is over."""

    def of_leaf(leaf):
        if not isinstance(leaf, Discrete | MultiDiscrete):
            return None
        rows = zip(time_step.obs[:, 1].astype(int), time_step.last, strict=True)
        return np.array([np.concatenate([(np.arange(n) != t % n) | over for n in sizes_of(leaf)]) for t, over in rows])

    return map_space(of_leaf, env.spec.action)


def allowed_action(env, mask):
    """The last choice that is allowed."""

    def of_leaf(leaf, flags):
        if flags is None:
            return np.zeros((env.num_envs, *leaf.shape), leaf.dtype)
        parts = np.split(flags, np.cumsum(sizes_of(leaf))[:-1], axis=1)
        chosen = np.array([part.shape[1] - 1 - part[:, ::-1].argmax(1) for part in parts], np.int32).T
        return chosen.reshape(env.num_envs, *leaf.shape)

    return map_space(of_leaf, env.spec.action, mask)


def assert_masks_are_as_expected(env, num_steps=14):
    assert env.spec.has_action_mask
    time_step, overs = env.reset(0), 0
    for _ in range(num_steps):
        wanted = expected(env, time_step)
        assert jax.tree.structure(time_step.action_mask) == jax.tree.structure(wanted)
        for mask, its in zip(jax.tree.leaves(time_step.action_mask), jax.tree.leaves(wanted), strict=True):
            assert mask.dtype == bool
            np.testing.assert_array_equal(mask, its)
        overs += time_step.last.any()
        time_step = env.step(allowed_action(env, time_step.action_mask))
    assert overs > 2


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_every_discrete_space_reach_the_agent(kind, flat):
    if not flat:
        given = toys.Choosy(kind)
        _, info = given.reset(seed=0)
        given.refuse(given.action_space, given.action_space.sample(mask=info["action_mask"]))  # The form is Gymnasium's.
    assert_masks_are_as_expected(envs.make(lambda: toys.Choosy(kind, flat=flat), num_envs=3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_masks_of_every_discrete_space_go_with_their_rows_in_a_vector_environment(kind, mode):
    lengths = [(3, 1, 5), (2, 4), (1, 3)]
    members = [functools.partial(toys.Choosy, kind, lengths=its, flat=kind == "dict") for its in lengths]
    assert_masks_are_as_expected(envs.make(Through(SyncVectorEnv(members, autoreset_mode=mode))))


def test_masks_of_a_tree_come_out_of_workers():
    env = envs.make(functools.partial(toys.Choosy, "dict"), num_envs=2, vectorization="async")
    try:
        assert_masks_are_as_expected(env)
    finally:
        env.close()


def test_where_a_part_of_a_tree_is_none_it_allows_all():
    env = envs.make(lambda: toys.Choosy("tuple", masks=(None, {"a": np.array([0, 1, 1]), "b": None}), lengths=(9,)))
    time_step = env.step(allowed_action(env, env.reset(0).action_mask))
    assert time_step.action_mask[0] is None and time_step.action_mask[1]["b"].tolist() == [[True, True, True]]
    assert time_step.action_mask[1]["a"].tolist() == [[False, True, True]]


def test_a_choice_that_has_none_left_where_the_episode_is_over_has_no_mask():
    env = envs.make(lambda: toys.Choosy("multi", final=(np.zeros(2, bool), np.array([0, 1, 0])), lengths=(1,)))
    time_step = env.step(allowed_action(env, env.reset(0).action_mask))
    assert time_step.last[0] and time_step.action_mask.tolist() == [[True, True, False, True, False]]


TREE = {"way": np.ones(4, bool), "knobs": np.ones(5, bool), "keys": None, "force": None}


@pytest.mark.parametrize(
    ("kind", "masks", "says"),
    [
        ("multi", np.ones(4, bool), r" must be a tuple of 2 arrays or have shape \(5,\), got \(4,\)"),
        ("multi", (np.ones(2, bool),), r" must be a tuple of 2 arrays or have shape \(5,\), got tuple of length 1"),
        ("multi", (np.ones(2, bool), np.ones(2, bool)), r" of entry 1 must have shape \(3,\), got \(2,\)"),
        ("multi", np.array([0, 0, 1, 1, 1]), " of entry 0 must allow at least one action"),
        ("multi", (np.full(2, 0.5), np.ones(3)), " of entry 0 must hold bools"),
        ("multi", (np.ones(2, bool), [[1], [1, 0]]), " of entry 1 is not an array"),
        ("dict", TREE | {"way": np.zeros(4, bool)}, " 'way' must allow"),
        (
            "dict",
            {"way": np.ones(4, bool)},
            r" must be a dict with keys \['force', 'keys', 'knobs', 'way'\], got a dict with .*'way'",
        ),
        ("dict", TREE | {"weigh": None}, r" must be a dict with keys .*, got a dict with keys .*'weigh'\]"),
        ("dict", np.ones(9, bool), " must be a dict with keys .*, got ndarray"),
        ("dict", TREE | {"force": np.ones(2)}, " 'force' must be None, as Box has no mask, got array"),
        ("dict", TREE | {"keys": np.ones(2)}, " 'keys' must be None, as MultiBinary has no mask, got array"),
        ("tuple", (None, {"a": np.ones(2, bool), "b": None}), r" '1/a' must have shape \(3,\), got \(2,\)"),
        ("tuple", (None,), " must be a tuple of length 2, got tuple of length 1"),
        ("tuple", {"a": None}, " must be a tuple of length 2, got dict"),
    ],
)
def test_a_bad_mask_is_an_error_naming_env_step_and_part(kind, masks, says):
    refused(envs.make(SyncVectorEnv(one_bad(kind, masks))), says)


@pytest.mark.parametrize(
    ("kind", "masks", "says"),
    [
        ("multi", (np.ones(2, bool), np.zeros(3, bool)), " of entry 1 must allow at least one action"),
        ("dict", {"way": np.ones(4, bool)}, r" must be a dict with keys .*, got a dict with keys \['way'\]"),
        (
            "dict",
            {"force": None, "keys": None, "knobs": None, "way": np.zeros(4, bool)},
            " 'way' must allow at least one action",
        ),
        ("dict", TREE | {"weigh": None}, r" must be a dict with keys .*, got a dict with keys .*'weigh'\]"),
        ("tuple", (None, {"a": np.ones(2, bool), "b": None}), r" '1/a' must have shape \(3,\), got \(2,\)"),
    ],
)
def test_a_bad_mask_in_a_vector_environment_is_an_error_naming_env_step_and_part(kind, masks, says):
    refused(envs.make(Through(SyncVectorEnv(one_bad(kind, masks)))), says)


def one_bad(kind, masks):
    """Two environments, of which the second hands out these masks."""
    return [functools.partial(toys.Choosy, kind), functools.partial(toys.Choosy, kind, masks=masks)]


def refused(env, says):
    action = allowed_action(env, env.reset(0).action_mask)
    with pytest.raises(ValueError, match=rf"env 1, step 1: the action_mask{says}"):
        env.step(action)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda masks: tuple(np.ones((2, n), bool) for n in (2, 3)), "have 2 entries, got tuple of length 2"),
        (lambda masks: np.ones((1, 5), bool), "have 2 entries, got ndarray of length 1"),
        (lambda masks: {"a": masks}, "have 2 entries, got dict of length 1"),
    ],
)
def test_masks_that_are_not_by_row_are_rejected(change, says):
    env = envs.make(Through(SyncVectorEnv([lambda: toys.Choosy("multi")] * 2), change))
    action = allowed_action(env, env.reset(0).action_mask)
    with pytest.raises(ValueError, match=f"env 0, step 1: the action_mask of a vector environment must {says}"):
        env.step(action)


def test_an_action_space_without_a_choice_has_no_masks():
    class Odd(toys.Tree):
        def __init__(self):
            super().__init__()
            self.action_space = self.action_space["bits"]

        def reset(self, **options):
            return super().reset(**options)[0], {"action_mask": np.ones(2)}

    with pytest.raises(TypeError, match=r"is supported for Discrete and MultiDiscrete actions, got MultiBinary"):
        envs.make(Odd)


@pytest.mark.slow
def test_ppo_trains_and_never_takes_what_is_forbidden():
    env = envs.make(functools.partial(toys.Choosy, "multi"), num_envs=2)
    agent = PPO(env.spec, network=MLP((4,)), num_steps=16, num_epochs=1, num_minibatches=1, learning_rate=0.1)
    result = loops.host(agent, env, env_steps=96, key=jax.random.key(0))
    assert result.progress.iteration >= 3 and np.isfinite(result.metrics["train/loss"])


def test_a_flat_list_is_a_mask_and_none_in_a_vector_environments_tree_is_none():
    entries = gym.MultiDiscrete([2, 3])
    np.testing.assert_array_equal(read_masks(entries, [1, 0, 1, 1, 1], "here"), [[True, False, True, True, True]])
    both = gym.Dict({"a": gym.Discrete(2), "b": gym.Discrete(3)})
    row = mask_of_env(both, {"a": np.array([[1, 0], [0, 1]]), "b": None}, 1, 2, "here")
    assert row["a"].tolist() == [0, 1] and row["b"] is None
    with pytest.raises(ValueError, match="here: the action_mask of a vector environment must have 2 entries, got int"):
        mask_of_env(gym.Discrete(2), 1, 0, 2, "here")
    with pytest.raises(ValueError, match=r"must have shape \(3,\), got \(7,\)"):
        read_masks(gym.Discrete(3), np.zeros(7), "here", is_last=True)
