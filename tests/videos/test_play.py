"""Episodes as frames: the ones that are evaluated, whatever the environment and the policy."""

import dataclasses

import gymnasium
import jax
import numpy as np
import pytest

import polyak
from polyak.envs import classic
from polyak.train.evaluation import evaluation_key
from polyak.videos.play import NUMBERS, check_images, check_numbers, play
from tests.videos.drawn import AGENT, ENV, GREY, Drawn

KEY = evaluation_key(3)


def policy_of(agent):
    return agent.policy(agent.init(jax.random.key(0)))


def frames_of(policy, env, *, episodes=1, max_steps=1000, has_value=False):
    return list(play("video", policy, env, key=KEY, episodes=episodes, max_steps=max_steps, has_value=has_value))


def test_every_step_of_each_episode_is_a_frame_with_its_numbers():
    frames = frames_of(policy_of(AGENT), ENV, episodes=2, has_value=True)
    assert [frame.image[0, 0, 0] // GREY for frame in frames] == [*range(6)] * 2
    assert [(frame.episode, frame.step) for frame in frames] == [(i, step) for i in range(2) for step in range(6)]
    assert [frame.total for frame in frames[:6]] == [0, 2, 4, 6, 8, 10] and [f.reward for f in frames[5:7]] == [2, 0]
    assert [frame.is_last for frame in frames] == [False] * 5 + [True] + [False] * 5 + [True]
    # The policy's own value of the observation, none at the end.
    policy, (_, time_step) = policy_of(AGENT).policy, ENV.init(KEY)
    for count in range(5):
        (value, *_) = policy.value(dataclasses.replace(time_step, obs=jax.numpy.full((8, 1), float(count))))
        assert frames[count].value == pytest.approx(float(value), abs=1e-6)
    assert frames[5].value is None and frames[5].describe("value") == "value –"
    assert frames[4].describe("return") == "return 8.0" and frames[4].describe("step") == "step 4"
    assert {frame.fps for frame in frames} == {12.0}


@pytest.mark.parametrize(
    ("name", "network", "steps"),
    [("jax/CartPole-v1", polyak.LSTM(4, hidden=(4,)), None), ("Pendulum-v1", polyak.MLP((4,)), 200)],
    ids=["recurrent, in JAX", "Box actions, on the host"],
)
def test_the_episodes_are_those_of_an_evaluation(name, network, steps):
    kwargs = {} if name.startswith("jax") else {"env_kwargs": {"render_mode": "rgb_array"}}
    env = polyak.envs.make(name, **kwargs)
    policy = policy_of(polyak.PPO(spec=env.spec, network=network))
    frames = frames_of(policy, env, episodes=2)
    evaluation = polyak.evaluate(policy, env, episodes=2, key=KEY)
    ends = [frame for frame in frames if frame.is_last]
    np.testing.assert_allclose([frame.total for frame in ends], evaluation.returns, rtol=1e-6)
    assert [frame.step for frame in ends] == evaluation.lengths.tolist() and ends[0].step == (steps or ends[0].step)


@pytest.mark.parametrize("name", classic.DYNAMICS)
def test_classic_control_in_jax_is_drawn_as_gymnasium_draws_it(name):
    env = polyak.envs.make(f"jax/{name}")
    state = classic.DYNAMICS[name]().reset(jax.random.key(1), 1)
    image, fps = env.render(env.init(jax.random.key(1))[0])
    original = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True)
    original.reset(seed=0)
    # The quantities have the order of Gymnasium's state; the last one is the number of steps.
    original.unwrapped.state = np.array([float(leaf[0]) for leaf in jax.tree.leaves(state)[:-1]])
    np.testing.assert_array_equal(image, original.render())
    assert fps == original.metadata["render_fps"] and len(np.unique(image.reshape(-1, 3), axis=0)) > 2
    original.close()


@pytest.mark.parametrize("convention", ["info", "method", "entry"])
def test_action_masks_are_respected(convention):
    played, key = [], "action_mask" if convention == "entry" else None

    class Masked(gymnasium.Env):
        """Allows one action in each step, and ends when another is taken or after 30 steps."""

        action_space = gymnasium.spaces.Discrete(4, start=2)
        x = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        mask_space = gymnasium.spaces.MultiBinary(4)
        observation_space = gymnasium.spaces.Dict({"x": x} | ({"action_mask": mask_space} if key else {}))
        render_mode = "rgb_array"

        def state(self):
            self.allowed = len(played) * 7 % 4
            mask = np.eye(4, dtype=np.int8)[self.allowed]
            obs = {"x": np.zeros(2, np.float32)} | ({"action_mask": mask} if key else {})
            return obs, {"action_mask": mask} if convention == "info" else {}

        def reset(self, *, seed=None, options=None):
            played.clear()
            return self.state()

        def step(self, action):
            assert action - 2 == self.allowed
            played.append(action)
            obs, info = self.state()
            return obs, 0.0, len(played) == 30, False, info

        def render(self):
            return np.zeros((2, 2, 3), np.uint8)

    if convention == "method":
        Masked.action_masks = lambda self: np.eye(4, dtype=bool)[self.allowed]
    env = polyak.envs.make(Masked, action_mask_key=key)
    assert env.spec.has_action_mask
    frames = frames_of(policy_of(polyak.PPO(spec=env.spec, network=polyak.MLP((4,)))), env)
    assert len(frames) == 31 and len(played) == 30 and frames[0].fps is None


def test_an_episode_that_does_not_end_is_cut_with_a_warning():
    env = polyak.envs.make("MountainCar-v0", env_kwargs={"render_mode": "rgb_array", "max_episode_steps": 10_000})
    with pytest.warns(UserWarning, match="video: the episode was cut after max_steps=50 steps"):
        assert len(frames_of(polyak.policies.Scripted(env.spec, [(10_000, 1)]), env, max_steps=50)) == 51


def test_the_screen_of_an_atari_game_is_of_the_game_that_is_played():
    pytest.importorskip("ale_py")
    env = polyak.envs.make("ALE/Pong-v5", env_kwargs={"render_mode": "rgb_array", "frameskip": 5})
    time_step = env.reset(3)
    for t in range(40):
        screen, fps = env.render()
        time_step = env.step(np.array([t % 6]))
    screen, fps = env.render()
    assert screen.shape == (210, 160, 3) and fps == 12
    # The agent's newest image is the screen, smaller and grey.
    newest = np.asarray(time_step.obs)[0, -1].astype(float)
    grey = screen.astype(float) @ [0.299, 0.587, 0.114]
    rows, columns = (np.arange(84) * size // 84 for size in grey.shape)
    assert np.corrcoef(grey[rows][:, columns].ravel(), newest.ravel())[0, 1] > 0.9
    env.close()


def test_what_cannot_be_drawn_is_said_in_one_sentence(monkeypatch):
    with pytest.raises(ValueError, match="CartPole-v1 draws no images: its render_mode must be 'rgb_array', got None"):
        check_images("video", polyak.envs.make("CartPole-v1", vectorization="sync"))
    with pytest.raises(ValueError, match=r"env must be created with num_envs=1, got 2"):
        check_images("video", polyak.envs.make("CartPole-v1", num_envs=2))
    monkeypatch.delattr(Drawn, "render")
    with pytest.raises(ValueError, match=r"Drawn draws no images; its dynamics must have a function render\(state\)"):
        check_images("video", ENV)
    env = polyak.envs.make("jax/Pendulum-v1")
    agent = polyak.SAC(spec=polyak.envs.make("jax/Pendulum-v1", action_scaling="rescale").spec)
    with pytest.raises(ValueError, match="show must be without 'value': the policy has none, its critics are separate"):
        frames_of(policy_of(agent), polyak.envs.make("jax/Pendulum-v1", action_scaling="rescale"), has_value=True)
    with pytest.raises(ValueError, match="action_scaling"):
        frames_of(policy_of(agent), env)
    with pytest.raises(TypeError, match="show must be a list of step, reward, return, value, got 'value'"):
        check_numbers("video", "value")
    assert check_numbers("video", [*NUMBERS, "step"]) == NUMBERS
