"""The ALE's own vector environment with DeepMind's preprocessing: threads in C++, one call a step for all games."""

import dataclasses
from typing import Any, ClassVar

import ale_py
import numpy as np
import numpy.typing as npt
from ale_py.vector_env import AtariVectorEnv

from polyak.core.struct import check_settings, choice, integer, number, struct
from polyak.envs.env_batch import RawStep, seeds_of
from polyak.envs.masks import Flags


@struct
class Atari:
    """Settings of the preprocessing, by the names of the ALE's vector environment.

    Attributes:
        frameskip: emulator frames for which an action is repeated; rewards are summed.
        maxpool: each image is the maximum of the last two frames, for sprites that are drawn in every other one.
        noop_max: a game begins with a random number of frames of doing nothing, at most so many.
        use_fire_reset: FIRE is pressed where an episode begins, after a lost life too, in games that have it.
        episodic_life: a lost life ends the agent's episode; the game goes on in the next.
        reward_clipping: the agent sees only the sign of the reward.
        img_height, img_width: of the grey images.
        stack_num: the newest images that make an observation, oldest first; black ones where a game begins.
        repeat_action_probability: of the emulator repeating the last action instead, at each frame; 0.25 in all `-v5` names.
        full_action_space: all 18 actions, not only those that the game knows.
        max_num_frames_per_episode: emulator frames after which a game is truncated; half an hour by default.
        num_threads: 0 is as many as there are cores.

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

    # What is done here, with each game's own count of lives: the ALE's own begins a new game after every lost life, so that
    # no agent would come to a second one, and its clipped rewards do not add up to the game's score.
    OURS: ClassVar[tuple[str, ...]] = ("noop_max", "episodic_life", "reward_clipping")

    def __post_init__(self) -> None:
        check_settings(self)

    def make(self, game: str, num_envs: int) -> AtariVectorEnv:
        """The ALE's environment: whole games, bare rewards, reset on the next step."""
        theirs = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in self.OURS}
        # It draws from 0 to noop_max - 1.
        return AtariVectorEnv(game, num_envs, **theirs, noop_max=self.noop_max + 1, episodic_life=False, reward_clipping=False)


class AtariBatch:
    """Games of one kind, as a batch that resets on the next step.

    Two accounts are kept. The agent's: episodes end with a life, rewards are signs. The game's, `RawStep.score`: the points of
    whole games, for the returns that are reported. In the step after a lost life the agent's action is ignored as after any
    end, and the game takes one step with FIRE, or does nothing where it has none; should it end in that step, the agent's
    episode is over as it begins.

    Args:
        game: as the ALE calls it, `"ms_pacman"`.
        num_envs: how many.
        settings: of the preprocessing.
        name: how errors call it.
    """

    def __init__(self, game: str, num_envs: int, settings: Atari, name: str) -> None:
        self.form = "atari"
        self.name = name
        self.num_envs = num_envs
        self._env: Any = settings.make(game, num_envs)
        self.obs_space: Any = self._env.single_observation_space
        self.action_space: Any = self._env.single_action_space
        self._episodic, self._clips = settings.episodic_life, settings.reward_clipping
        actions = self._env.ale.get_action_set()
        fires = settings.use_fire_reset and ale_py.Action.FIRE in actions
        self._opening = actions.index(ale_py.Action.FIRE if fires else ale_py.Action.NOOP)
        self._lives: npt.NDArray[Any] = np.zeros(num_envs, np.int32)
        self._over: Flags = np.zeros(num_envs, bool)

    def probe(self) -> bool:
        """There are no action masks."""
        return False

    def seeds(self, seed: int) -> list[int]:
        """The seed that each game gets; 31 bits are what the ALE takes."""
        return [its >> 1 for its in seeds_of(seed, self.num_envs)]

    def reset(self, seed: int) -> RawStep:
        """Fresh games everywhere."""
        obs, info = self._env.reset(seed=np.array(self.seeds(seed)))
        nobody, nothing = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, np.float32)
        self._lives, self._over = info["lives"], nobody
        return RawStep([obs], nothing, nobody, nobody, score=(nothing, nobody, ~nobody))

    def step(self, action: Any, due: Flags) -> RawStep:
        """One step of every game; those that are `due` begin the agent's next episode."""
        restarts, lives = self._over, self._lives
        if np.count_nonzero(due):
            action = np.where(due, self._opening, action)
        obs, points, terminated, truncated, info = self._env.step(action)
        self._lives, self._over = info["lives"], terminated | truncated
        points = points.astype(np.float32)
        reward = np.where(due, np.float32(0), np.sign(points) if self._clips else points)
        score = (points, self._over, restarts)
        if self._episodic:
            terminated = terminated | ((self._lives < lives) & (self._lives > 0) & ~due)
        return RawStep([obs], reward, terminated, truncated, score=score)

    def save(self) -> None:
        """None: the ALE's vector environment does not hand out its state."""

    def load(self, snapshots: list[Any]) -> None:
        """There is nothing that could be loaded."""
        raise ValueError(f"{self.name}: Atari games have no snapshots")

    def close(self) -> None:
        """End the threads, which live as long as the ALE's object."""
        self._env.ale = None
