"""Frame stacks: each frame is stored once, and stacks are those of the environment to the bit."""

import dataclasses

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.core.types import EpisodeRecord, Rollout, TimeStep
from polyak.envs.autoreset import AutoReset
from polyak.replay import PrioritizedReplay, UniformReplay
from polyak.storage.checkpoint import restore, save
from tests.replay.streams import add, slow_lines

KEY = jax.random.key(0)
STACK = 4


def game_stream(total, envs, lives, padding, seed=0):
    """Time steps of games whose frames are random bytes; an episode is a life, and a reset within a game goes on stacking."""
    rng = np.random.default_rng(seed)
    obs = np.zeros((total, envs, STACK, 2, 3), np.uint8)
    last, terminated, truncated = (np.zeros((total, envs), bool) for _ in range(3))
    first, game_first = np.zeros((total, envs), bool), np.zeros((total, envs), bool)
    for env in range(envs):
        game_over, life_over = True, True
        for t in range(total):
            frame = rng.integers(1, 256, (2, 3), np.uint8)
            game_first[t, env], first[t, env] = game_over, life_over
            before = obs[t - 1, env, 1:]
            if game_over:
                before = np.broadcast_to(frame if padding == "first" else 0, (STACK - 1, 2, 3))
            obs[t, env] = np.concatenate([before, frame[None]])
            ends = rng.random() < 0.2 and not life_over
            game_over = ends and (not lives or rng.random() < 0.5)
            truncated[t, env] = game_over and rng.random() < 0.5
            terminated[t, env], life_over = ends and not truncated[t, env], ends
            last[t, env] = game_over
    zeros = jnp.zeros((total, envs))
    record = EpisodeRecord(zeros, jnp.asarray(last), jnp.asarray(game_first))
    flags = [jnp.asarray(x) for x in (terminated, truncated, first)]
    return TimeStep(jnp.asarray(obs), zeros, *flags, record=record)


def filled(replay, steps):
    """The state, and the number of the time step in each slot."""
    envs, num_steps = steps.reward.shape[1], 2
    state = replay.init(np.zeros((STACK, 2, 3), np.uint8), jnp.zeros((), jnp.int32), num_steps=num_steps)
    for t in range(0, len(steps.reward) - num_steps, num_steps):
        part = jax.tree.map(lambda x, t=t: x[t : t + num_steps + 1], steps)
        actions = jnp.broadcast_to(jnp.arange(t, t + num_steps, dtype=jnp.int32)[:, None], (num_steps, envs))
        state = add(replay, state, Rollout(part, actions))
    return state


@pytest.mark.parametrize("kind", [UniformReplay, PrioritizedReplay])
@pytest.mark.parametrize("padding", ["zero", "first"])
@pytest.mark.parametrize(("total", "capacity"), [(40, 200), (97, 50)])
def test_drawn_stacks_are_those_of_the_environment(kind, padding, total, capacity):
    envs, n_step = 2, 3
    steps = game_stream(total, envs, lives=True, padding=padding)
    replay = kind(capacity, frame_stack=STACK, frame_padding=padding)
    state = filled(replay, steps)
    assert state.rows.obs.shape == (capacity, 2, 3) and state.rows.obs.dtype == jnp.uint8
    batch = jax.jit(lambda state: replay.sample(state, KEY, 2_000, num_envs=envs, n_step=n_step, gamma=0.5))(state)
    time, env, weight = (np.asarray(x) for x in (batch.action, batch.index % envs, batch.weight > 0))
    obs = np.asarray(steps.obs)
    np.testing.assert_array_equal(np.asarray(batch.obs)[weight], obs[time, env][weight])
    # The next observation is found by the number of steps that were summed.
    last = np.asarray(steps.last)
    newest = (total - 1) // 2 * 2
    for row in np.flatnonzero(weight):
        after = time[row] + 1
        while after < newest and after - time[row] < n_step and not last[after, env[row]]:
            after += 1
        np.testing.assert_array_equal(np.asarray(batch.next_obs)[row], obs[after, env[row]])
    # All rows with a complete stack are drawn: at most those of the oldest three slots are not.
    stored = range(max(0, newest - capacity // envs // 2 * 2 + 1), newest)
    drawn = {(int(t), int(e)) for t, e in zip(time[weight], env[weight], strict=True)}
    assert {(t, e) for t in stored[3:] for e in range(envs) if not last[t, e]} <= drawn
    assert total < capacity or not np.asarray(weight).all() or len(drawn) < len(stored) * envs


@pytest.mark.slow
def test_a_stream_that_begins_within_a_game_is_not_drawn_until_its_stacks_are_complete():
    steps = game_stream(60, 1, lives=False, padding="zero", seed=3)
    no = jnp.zeros_like(steps.first)
    steps = dataclasses.replace(steps, terminated=no, truncated=no, first=no, record=EpisodeRecord(steps.reward, no, no))
    replay = UniformReplay(32, frame_stack=STACK)
    state = filled(replay, jax.tree.map(lambda x: x[:13], steps))
    batch = replay.sample(state, KEY, 500, num_envs=1, gamma=0.5)
    assert set(np.asarray(batch.action)[np.asarray(batch.weight) > 0].tolist()) == set(range(3, 12))


@pytest.mark.slow
def test_stacks_of_gymnasium_are_those_of_its_wrapper():
    env = gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), STACK)
    hosted = polyak.envs.make(lambda: env, num_envs=1)
    agent = polyak.DQN(
        hosted.spec,
        replay=polyak.UniformReplay(64, STACK, "first"),
        learning_starts=16,
        batch_size=8,
        num_steps=2,
        network=polyak.MLP((8,)),
        updates_per_step=0.5,
    )
    seen = []

    def keep(progress, metrics, state):
        seen.append(np.asarray(state.time_step.obs[0]))

    result = polyak.loops.host(agent, hosted, env_steps=40, key=KEY, callbacks=[keep], report_every=2)
    batch = agent.replay.sample(result.state.replay, KEY, 256, num_envs=1, gamma=0.9)
    stacks = {x.tobytes() for x in seen}
    drawn = [x.tobytes() in stacks for x, w in zip(np.asarray(batch.next_obs), np.asarray(batch.weight), strict=True) if w]
    # Every second time step was reported.
    assert np.mean(drawn) > 0.3 and int(result.state.updates) > 0


@struct
class Sum:
    """A game of at most 12 steps; a frame is the step, and the sum of noisy actions, at which the game ends."""

    @property
    def spec(self):
        return EnvSpec(Box(np.full((STACK, 2), -99.0), np.full((STACK, 2), 99.0)), Discrete(2), "sum")

    def reset(self, key, num_envs):
        return jnp.zeros((num_envs, STACK, 2)).at[:, -1, 0].set(1.0)

    def step(self, state, action, key):
        noise = jax.random.uniform(key, action.shape)
        frame = state[:, -1] + jnp.stack([jnp.ones_like(noise), noise + action.astype(jnp.float32) - 0.8], axis=1)
        return jnp.concatenate([state[:, 1:], frame[:, None]], axis=1), frame[:, 1], frame[:, 1] > 2.0, frame[:, 0] > 12.0

    def observe(self, state):
        return state


@pytest.mark.slow
def test_a_training_with_frame_stacks_on_two_devices_resumes_to_the_bit(tmp_path):
    env = AutoReset(Sum(), 4)
    settings = {"network": polyak.MLP((8,)), "learning_starts": 32, "batch_size": 8, "n_step": 3}
    agent = polyak.DQN(env.spec, num_steps=2, replay=PrioritizedReplay(128, frame_stack=STACK), target_period=5, **settings)
    options = {"key": KEY, "devices": 2}
    whole = polyak.loops.compiled(agent, env, env_steps=256, **options)
    assert int(whole.state.updates) > 20 and whole.state.replay.rows.obs.shape == (128, 2)
    half = polyak.loops.compiled(agent, env, env_steps=128, **options)
    save(tmp_path / "checkpoints", half.loop_state, step=128, meta={}, segmented=".agent.replay")
    restored = restore(tmp_path / "checkpoints", half.loop_state).tree
    resumed = polyak.loops.compiled(
        agent, env, env_steps=256, **options, resume_from=restored, env_steps_done=half.progress.env_steps
    )
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_observations_must_be_stacks():
    for size in (3, 4):
        with pytest.raises(
            ValueError, match=rf"with frame_stack=4 obs must be that number of frames .*, got shape \({size},\)"
        ):
            UniformReplay(64, frame_stack=4).init(np.zeros(size), jnp.zeros((), jnp.int32), num_steps=1)


def test_stacks_are_stored_in_a_quarter_of_the_memory_and_no_storage_is_copied():
    obs = np.zeros((STACK, 84, 84), np.uint8)
    replay = UniformReplay(5_000, frame_stack=STACK)
    state = jax.eval_shape(lambda: replay.init(obs, jnp.zeros((), jnp.int32), num_steps=2))
    plain = jax.eval_shape(lambda: UniformReplay(5_000).init(obs, jnp.zeros((), jnp.int32), num_steps=2))
    assert plain.nbytes / state.nbytes > 3.99
    assert "memory=35.3 MB" in str(state) and "capacity=5000" in str(state)
    steps = jax.eval_shape(lambda: game_stream(3, 2, True, "zero"))
    steps = dataclasses.replace(steps, obs=jax.ShapeDtypeStruct((3, 2, *obs.shape), jnp.uint8))
    rollout = Rollout(steps, jax.ShapeDtypeStruct((2, 2), jnp.int32))

    def step(state, rollout):
        state = replay.add(state, rollout)
        return state, replay.sample(state, KEY, 8, num_envs=2, n_step=3, gamma=0.9)

    text = jax.jit(step, donate_argnums=0).lower(state, rollout).compile().as_text()
    assert "[5000" in text and not slow_lines(text, 5_000)


@pytest.mark.slow
def test_stacks_of_atari_go_on_over_lost_lives_and_begin_black_with_a_game():
    settings = {"img_height": 20, "img_width": 16, "max_num_frames_per_episode": 600}
    env = polyak.envs.make("ALE/Breakout-v5", num_envs=2, env_kwargs=settings)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 4, (400, 2)).astype(np.int32)
    steps = [env.reset(0), *[env.step(action) for action in actions]]
    env.close()
    steps = jax.tree.map(lambda *x: np.stack(x), *steps)
    games, episodes = steps.episode_record.first.sum(), steps.first.sum()
    assert 2 < games < episodes
    replay = UniformReplay(1_600, frame_stack=STACK)
    state = replay.init(steps.obs[0, 0], jnp.zeros((), jnp.int32), num_steps=400)
    # The number of the time step stands in for its action.
    numbers = jnp.broadcast_to(jnp.arange(400, dtype=jnp.int32)[:, None], (400, 2))
    state = replay.add(state, Rollout(jax.tree.map(jnp.asarray, steps), numbers))
    index = jnp.arange(800, dtype=jnp.int32)
    batch = replay.transitions(state, index, num_envs=2, n_step=3, gamma=0.9)
    time, env_number, weight = np.asarray(batch.action), np.asarray(index) % 2, np.asarray(batch.weight) > 0
    assert weight.sum() == steps.last[:-1].size - steps.last[:-1].sum()
    np.testing.assert_array_equal(np.asarray(batch.obs)[weight], steps.obs[time, env_number][weight])
