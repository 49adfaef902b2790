"""Environments for tests: scripted episodes, and faults of every kind. No JAX: they also run in worker processes."""

import os
import sys
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np


class Scripted(gym.Env):
    """Episodes of the given lengths, in turn; they terminate, truncate, or both, in turn.

    obs: episode, step in it, action that led here, noise. reward: noise + step / 8.
    """

    def __init__(self, lengths: tuple[int, ...] = (3, 1, 5), n: int = 4, start: int = 0):
        self.lengths = lengths
        self.observation_space = gym.spaces.Box(-100.0, 100.0, (4,), np.float64)
        self.action_space = gym.spaces.Discrete(n, start=start)
        self.episode = -1
        self.t = 0

    def obs(self, action: int) -> np.ndarray:
        return np.array([self.episode, self.t, action, self.np_random.uniform(-1, 1)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        if seed is not None:
            self.episode = -1
        self.episode += 1
        self.t = 0
        return self.obs(-1), {}

    def step(self, action: Any):
        assert self.action_space.contains(action), action
        return self.advance(int(action))

    def advance(self, action: int):
        self.t += 1
        end = self.t >= self.lengths[self.episode % len(self.lengths)]
        terminated = bool(end and self.episode % 3 != 1)
        truncated = bool(end and self.episode % 3 != 0)
        obs = self.obs(action)
        noise = obs["obs"][3] if isinstance(obs, dict) else obs[3]
        return obs, float(noise) + self.t / 8, terminated, truncated, {}


class Masked(Scripted):
    """Forbids the action `t % n`, unless told otherwise."""

    def __init__(self, masks: Any = None, from_reset: bool = True, **options: Any):
        super().__init__(**options)
        self.masks = masks
        self.from_reset = from_reset

    def mask(self) -> Any:
        if self.masks is not None:
            return self.masks
        return np.arange(4) != self.t % 4

    def reset(self, **options: Any):
        obs, _ = super().reset(**options)
        return obs, {"action_mask": np.ones(4, np.int8)} if self.from_reset else {}

    def step(self, action: Any):
        *answer, _ = super().step(action)
        # As many environments do, none where the episode is over.
        over = answer[2] or answer[3]
        return (*answer, {} if over else {"action_mask": self.mask()})


CHOICES = {
    "multi": gym.spaces.MultiDiscrete([2, 3], start=[1, -2]),
    "dict": gym.spaces.Dict(
        {
            "way": gym.spaces.Discrete(4, start=5),
            "knobs": gym.spaces.MultiDiscrete([2, 3], start=[0, 7]),
            "keys": gym.spaces.MultiBinary(2),
            "force": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
    ),
    "tuple": gym.spaces.Tuple(
        (gym.spaces.Box(-1.0, 1.0), gym.spaces.Dict({"b": gym.spaces.MultiDiscrete([3]), "a": gym.spaces.Discrete(3)}))
    ),
}


class Reporting(Scripted):
    """Puts into `info`: the action as `force`, a text, and success in half of the episodes."""

    def __init__(self, force: Any = float, **options: Any):
        super().__init__(**options)
        self.force = force

    def step(self, action: Any):
        *answer, info = super().step(action)
        is_success = np.float32(self.episode % 4 in (0, 3))
        return (*answer, info | {"force": self.force(action), "text": "fast", "is_success": is_success})


class Doubled(gym.RewardWrapper):
    """Doubles the reward that the agent sees."""

    def reward(self, reward: Any) -> Any:
        return 2 * reward


def recorded(**options: Any) -> gym.Env:
    """Records the return before a wrapper doubles the reward."""
    return Doubled(gym.wrappers.RecordEpisodeStatistics(Reporting(**options)))


class MaskMethod(Scripted):
    """Masks as sb3-contrib reads them: from a method, which fails where the episode is over."""

    def action_masks(self) -> Any:
        assert self.t < self.lengths[self.episode % len(self.lengths)], "the episode is over"
        return np.arange(4) != self.t % 4


class MaskObs(Scripted):
    """Masks as RLlib and PettingZoo hand them out: in the observation."""

    def __init__(self, dtype: Any = np.int8, **options: Any):
        super().__init__(**options)
        self.dtype = dtype
        flags = gym.spaces.Box(0, 1, (4,), dtype)
        self.observation_space = gym.spaces.Dict({"obs": self.observation_space, "action_mask": flags})

    def obs(self, action: int) -> Any:
        return {"obs": super().obs(action), "action_mask": (np.arange(4) != self.t % 4).astype(self.dtype)}


class Choosy(Scripted):
    """Forbids, in every choice among n of its action, the one with index `t % n`, and fails where it is taken.

    Args:
        kind: of `CHOICES`.
        masks: handed out from step 1 on, if not None.
        final: the mask where the episode is over; without it there is none.
    """

    def __init__(self, kind: str = "dict", masks: Any = None, final: Any = None, flat: bool = False, **options: Any):
        super().__init__(**options)
        self.action_space = CHOICES[kind]
        self.masks, self.final, self.flat = masks, final, flat

    def mask(self, space: Any) -> Any:
        """As `space.sample(mask)` takes it."""
        if isinstance(space, gym.spaces.Dict):
            return {key: self.mask(part) for key, part in space.spaces.items()}
        if isinstance(space, gym.spaces.Tuple):
            return tuple(self.mask(part) for part in space.spaces)
        if isinstance(space, gym.spaces.MultiDiscrete):
            masks = tuple((np.arange(n) != self.t % n).astype(np.int8) for n in space.nvec)
            return np.concatenate(masks) if self.flat else masks
        return (np.arange(space.n) != self.t % space.n).astype(np.int8) if isinstance(space, gym.spaces.Discrete) else None

    def refuse(self, space: Any, action: Any) -> None:
        if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
            for key in space.spaces if isinstance(space, gym.spaces.Dict) else range(len(space.spaces)):
                self.refuse(space.spaces[key], action[key])
        elif isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            sizes = space.nvec if isinstance(space, gym.spaces.MultiDiscrete) else space.n
            assert np.all(action - space.start != self.t % sizes), f"{action} is forbidden in step {self.t} of the episode"

    def reset(self, **options: Any):
        obs, _ = super().reset(**options)
        return obs, {"action_mask": self.mask(self.action_space)}

    def step(self, action: Any):
        assert self.action_space.contains(action), action
        self.refuse(self.action_space, action)
        *answer, _ = self.advance(0)
        mask = self.mask(self.action_space) if self.masks is None else self.masks
        if answer[2] or answer[3]:
            mask = self.final
        return (*answer, {} if mask is None else {"action_mask": mask})


class Faulty(gym.Env):
    """Does as it should until `at` steps are done, then answers `answer(obs, reward, terminated, truncated, info)`."""

    def __init__(self, at: int = 3, answer: Any = None, on_reset: Any = None, on_close: Any = None, obs_space: Any = None):
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32) if obs_space is None else obs_space
        self.action_space = gym.spaces.Discrete(2)
        self.at, self.answer, self.on_reset, self.on_close = at, answer, on_reset, on_close
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        if self.on_reset is not None:
            return self.on_reset()
        return np.zeros(3, np.float32), {}

    def step(self, action: Any):
        self.steps += 1
        good = (np.full(3, 0.5, np.float32), 1.0, False, False, {})
        return self.answer(*good) if self.steps == self.at and self.answer is not None else good

    def close(self):
        if self.on_close is not None:
            self.on_close()


class Tree(gym.Env):
    """Observations and actions of every supported kind; what comes in goes out."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "b": gym.spaces.Tuple((gym.spaces.Discrete(3, start=5), gym.spaces.MultiDiscrete([2, 4], start=[1, -3]))),
                "a": gym.spaces.Box(0, 255, (2, 2), np.uint8),
                "c": gym.spaces.Dict({"bits": gym.spaces.MultiBinary(3), "far": gym.spaces.Box(-np.inf, np.inf, (2,))}),
            }
        )
        self.action_space = gym.spaces.Dict(
            {
                "go": gym.spaces.Tuple((gym.spaces.Discrete(3, start=-1), gym.spaces.Box(-2.0, 3.0, (2,), np.float64))),
                "which": gym.spaces.MultiDiscrete([3, 2], start=[10, 20]),
                "bits": gym.spaces.MultiBinary(2),
            }
        )
        self.seen: list[Any] = []

    def obs(self, k: int):
        return {
            "a": np.full((2, 2), k, np.uint8),
            "b": (np.int64(5 + k % 3), np.array([1 + k % 2, -3 + k % 4])),
            "c": {"bits": np.array([k % 2, 1, 0], np.int8), "far": np.array([k, -k], np.float32)},
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return self.obs(0), {}

    def step(self, action: Any):
        assert self.action_space.contains(action), action
        self.seen.append(action)
        return self.obs(len(self.seen)), 0.0, False, False, {}


class Shared(gym.Env):
    """Writes every observation into one array and hands that out."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.buffer = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.buffer[:] = 0
        return self.buffer, {}

    def step(self, action: Any):
        self.buffer += 1
        action *= 0
        return self.buffer, 0.0, False, False, {}


class Counting(gym.Env):
    """Counts, and can tell and take its count, which is all its state besides the generator."""

    def __init__(self, state: Any = None):
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.hidden = object()
        self.count = 0
        self.state = state

    def get_state(self) -> Any:
        return {"count": self.count} if self.state is None else self.state

    def set_state(self, state: Any) -> None:
        self.count = state["count"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([0, self.np_random.random()], np.float32), {}

    def step(self, action: Any):
        self.count += 1
        obs = np.array([self.count, self.np_random.random()], np.float32)
        return obs, 1.0, self.count % 7 == 0, False, {}


class Secretive(Counting):
    """Has state that nobody can get at."""

    get_state = None
    set_state = None


class Curious(Counting):
    """Observes whether JAX was imported in its process, and whether its parent is the trainer."""

    def __init__(self, trainer: int):
        super().__init__()
        self.trainer = trainer

    def reset(self, **options: Any):
        super().reset(**options)
        return np.array(["jax" in sys.modules, os.getppid() == self.trainer], np.float32), {}


class InJax(Counting):
    """Computes its observations with JAX, in a program that it compiles."""

    def reset(self, **options: Any):
        import jax

        self.move = jax.jit(lambda x: jax.numpy.sin(x + 1))
        self.place = self.move(np.float32(0))
        return self.observed(super().reset(**options)[0]), {}

    def step(self, action: Any):
        obs, *rest = super().step(action)
        self.place = self.move(self.place)
        return self.observed(obs), *rest

    def observed(self, obs: Any):
        return np.full_like(obs, self.place)


class UserError(Exception):
    """An exception that cannot be made again from its arguments."""

    def __init__(self, code: int, *, detail: str):
        super().__init__(f"code {code}: {detail}")
        self.code = code


class Unsendable(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, message: str = "unsendable"):
        super().__init__(message)
        self.lock = threading.Lock()


def raise_key_error(*_: Any) -> Any:
    raise KeyError("the user's own")


def raise_user_error(*_: Any) -> Any:
    raise UserError(7, detail="from deep inside")


def raise_unsendable(*_: Any) -> Any:
    raise Unsendable


def exit_hard(*_: Any) -> Any:
    os._exit(3)


def sleep_long(*_: Any) -> Any:
    time.sleep(60)
