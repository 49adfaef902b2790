"""Next-step autoreset over single environments, as slowly and plainly as it can be written."""

import numpy as np


def play(make_env, seeds, actions, resets_twice=False):
    """Time steps [T + 1, B] as (obs, reward, terminated, truncated, first), one environment after the other.

    Args:
        resets_twice: before the reset on the step after an episode's end, reset the environment, step it on the ignored
            action, and reset it if the episode ended with that.
    """
    columns = []
    for i, seed in enumerate(seeds):
        env = make_env()
        obs, _ = env.reset(seed=seed)
        column, last = [(obs, 0.0, False, False, True)], False
        for action in actions[:, i]:
            if last:
                if resets_twice:
                    env.reset()
                    _, _, terminated, truncated, _ = env.step(action)
                    if terminated or truncated:
                        env.reset()
                obs, _ = env.reset()
                column.append((obs, 0.0, False, False, True))
                last = False
                continue
            obs, reward, terminated, truncated, _ = env.step(action)
            last = terminated or truncated
            column.append((obs, reward, terminated, truncated, False))
        columns.append(column)
    return [np.array([[row[k] for row in column] for column in columns]).swapaxes(0, 1) for k in range(5)]


def record(env, seed, actions):
    """The same of one of our environments."""
    steps = [env.reset(seed)] + [env.step(action) for action in actions]
    return [np.stack([getattr(s, name) for s in steps]) for name in ("obs", "reward", "terminated", "truncated", "first")]


def assert_same(ours, expected):
    """Equal, but for our dtypes."""
    for mine, theirs, dtype in zip(ours, expected, (np.float32, np.float32, bool, bool, bool), strict=True):
        assert mine.dtype == dtype
        np.testing.assert_array_equal(mine, theirs.astype(dtype))
