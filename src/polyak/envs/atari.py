"""Atari games in the ALE's vector environment (C++ threads), with DeepMind's preprocessing."""

import dataclasses
from typing import Any, ClassVar

import ale_py
import numpy as np
import numpy.typing as npt
from ale_py.vector_env import AtariVectorEnv

from polyak.core.struct import check_settings, choice, integer, number, struct
from polyak.envs.env_batch import RawStep, seeds_of
from polyak.envs.masks import Flags
from polyak.envs.single_env import ATARI_FPS

SCREEN = (210, 160)
"""Height and width of the emulator's screen."""


@struct
class Atari:
    """Settings of the preprocessing, named as in the ALE's vector environment.

    Attributes:
        frameskip: number of emulator frames for which an action is repeated; their rewards are summed.
        maxpool: each image is the maximum of the last two frames, as some sprites are drawn in every other frame.
        noop_max: a game starts with a random number of NOOP frames, at most this many.
        use_fire_reset: press FIRE at the start of an episode, also after a lost life, in games that have FIRE.
        episodic_life: a lost life ends the agent's episode; the next episode continues the game.
        reward_clipping: the agent gets only the sign of the reward.
        img_height, img_width: size of the grey images.
        stack_num: number of latest images in an observation, oldest first; black images at the start of a game.
        repeat_action_probability: probability per frame that the emulator repeats the last action; 0.25 in all `-v5` names.
        full_action_space: use all 18 actions, not only the game's actions.
        max_num_frames_per_episode: emulator frames after which a game is truncated; half an hour by default.
        num_threads: 0 for one per core.

    Raises:
        TypeError, ValueError: a setting is unknown or out of its range.

    Source: Mnih et al. 2015; Machado et al. 2018, arXiv:1709.06009, for the repeated actions.
    """

    frameskip: int = integer(default=4, at_most=1000)
    maxpool: bool = choice(default=True, choices=(True, False))
    noop_max: int = integer(default=30, at_least=0, at_most=10000)
    use_fire_reset: bool = choice(default=True, choices=(True, False))
    episodic_life: bool = choice(default=True, choices=(True, False))
    reward_clipping: bool = choice(default=True, choices=(True, False))
    img_height: int = integer(default=84, at_most=1024)
    img_width: int = integer(default=84, at_most=1024)
    stack_num: int = integer(default=4, at_most=64)
    repeat_action_probability: float = number(default=0.25, at_least=0.0, at_most=1.0, static=True)
    full_action_space: bool = choice(default=False, choices=(True, False))
    max_num_frames_per_episode: int = integer(default=108_000)
    num_threads: int = integer(default=0, at_least=0, at_most=1024)

    # Implemented here, as the ALE's episodic_life starts a new game after every lost life, so that no agent would reach the
    # second life, and the ALE's clipped rewards do not add up to the game's score.
    NOT_OF_THE_ALE: ClassVar[tuple[str, ...]] = ("noop_max", "episodic_life", "reward_clipping")

    def __post_init__(self) -> None:
        check_settings(self)

    def make(self, game: str, num_envs: int) -> AtariVectorEnv:
        """Create the ALE's environment: complete games, unclipped rewards, next-step autoreset."""
        return AtariVectorEnv(game, num_envs, **self._arguments())

    def make_screen(self, game: str, num_envs: int) -> AtariVectorEnv:
        """Create an equal environment whose observation is the emulator's screen, in colour."""
        screen = {"img_height": SCREEN[0], "img_width": SCREEN[1], "stack_num": 1, "grayscale": False}
        return AtariVectorEnv(game, num_envs, **self._arguments() | screen)

    def _arguments(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in self.NOT_OF_THE_ALE}
        # The ALE draws from 0 to noop_max - 1.
        return {**own, "noop_max": self.noop_max + 1, "episodic_life": False, "reward_clipping": False}


class AtariBatch:
    """A batch of one Atari game with next-step autoreset.

    The agent's episodes end with a life and the agent's rewards are signs; `RawStep.record` has the points of complete games,
    for the reported returns. In the step after a lost life the agent's action is ignored, as after any end of an episode, and
    the game takes one step with FIRE (NOOP if the game has no FIRE); if the game ends in this step, so does the new episode.

    Args:
        game: name of the game in the ALE, such as `"ms_pacman"`.
        num_envs: number of environments.
        settings: settings of the preprocessing.
        name: name of the environment in errors.
        draws: play the same games a second time, with the screen in colour as observation, for `render`.
    """

    def __init__(self, game: str, num_envs: int, settings: Atari, name: str, *, draws: bool = False) -> None:
        self.form = "atari"
        self.name = name
        self.num_envs = num_envs
        self._env: Any = settings.make(game, num_envs)
        self._screens: Any = settings.make_screen(game, num_envs) if draws else None
        self._screen: npt.NDArray[np.uint8] | None = None
        self._fps = ATARI_FPS / settings.frameskip
        self.obs_space: Any = self._env.single_observation_space
        self.action_space: Any = self._env.single_action_space
        self._episodic, self._clips = settings.episodic_life, settings.reward_clipping
        actions = self._env.ale.get_action_set()
        fires = settings.use_fire_reset and ale_py.Action.FIRE in actions
        self._first_action = actions.index(ale_py.Action.FIRE if fires else ale_py.Action.NOOP)
        self._lives: npt.NDArray[Any] = np.zeros(num_envs, np.int32)
        self._is_game_over: Flags = np.zeros(num_envs, bool)
        self._start, self._total = 0, num_envs

    def probe(self) -> bool:
        """Return False: there are no action masks."""
        return False

    def seeds(self, seed: int) -> list[int]:
        """Return a seed of 31 bits, which the ALE accepts, for each game."""
        return [seed >> 1 for seed in seeds_of(seed, self._total)[self._start : self._start + self.num_envs]]

    def take_part(self, start: int, total: int) -> None:
        """Use the seeds of games `start`, ... of a batch of `total`."""
        self._start, self._total = start, total

    def reset(self, seed: int) -> RawStep:
        """Start a new game in every environment."""
        obs, info = self._env.reset(seed=np.array(self.seeds(seed)))
        if self._screens is not None:
            self._screen = self._screens.reset(seed=np.array(self.seeds(seed)))[0][0, 0]
        none, zeros = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, np.float32)
        self._lives, self._is_game_over = info["lives"], none
        return RawStep([obs], zeros, none, none, record=(zeros, none, ~none))

    def step(self, action: Any, reset_mask: Flags) -> RawStep:
        """Step every game; where `reset_mask` is set, start the agent's next episode."""
        is_new_game, lives = self._is_game_over, self._lives
        if np.count_nonzero(reset_mask):
            action = np.where(reset_mask, self._first_action, action)
        obs, points, terminated, truncated, info = self._env.step(action)
        if self._screens is not None:
            self._screen = self._screens.step(action)[0][0, 0]
        self._lives, self._is_game_over = info["lives"], terminated | truncated
        points = points.astype(np.float32)
        reward = np.where(reset_mask, np.float32(0), np.sign(points) if self._clips else points)
        record = (points, self._is_game_over, is_new_game)
        if self._episodic:
            terminated = terminated | ((self._lives < lives) & (self._lives > 0) & ~reset_mask)
        return RawStep([obs], reward, terminated, truncated, record=record)

    def goal_env(self) -> Any:
        """Return the ALE's environment, which has no goals."""
        return self._env

    def render(self) -> tuple[Any, float]:
        """Return the screen of the first game, and its frames per second.

        Raises:
            ValueError: the batch was not created to draw.
        """
        if self._screen is None:
            raise ValueError(f"{self.name} draws no images: its render_mode must be 'rgb_array', got None")
        return self._screen, self._fps

    def save(self) -> None:
        """Return None: the ALE's vector environment cannot save its state."""

    def load(self, snapshots: list[Any]) -> None:
        """Raise an error, as there are no snapshots."""
        raise ValueError(f"{self.name}: snapshots of Atari games cannot be restored")

    def close(self) -> None:
        """Delete the ALE's object, which ends its threads."""
        for env in filter(None, (self._env, self._screens)):
            env.ale = None
