"""Plays episodes of a policy, one image a step."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import PRNGKeyArray

from polyak.core.checks import check_choice
from polyak.core.policy_faults import ExceptionRelay, check_error_flags
from polyak.core.printing import format_number
from polyak.core.types import Env, HostEnv, Policy
from polyak.core.warn import warn
from polyak.envs.rendered_env import single_copy
from polyak.loops.host_actor import make_actor
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import check_spec, host_seed
from polyak.policies.info import with_info

Image: TypeAlias = npt.NDArray[np.uint8]
Number: TypeAlias = Literal["step", "reward", "return", "value"]

NUMBERS: tuple[Number, ...] = get_args(Number)
"""The numbers that a frame can show."""

NOTHING = "–"
"""Text of a missing value."""

ANY = np.array([True])
BLOCK = 256
"""Number of steps for which random numbers are drawn at a time."""


@runtime_checkable
class DrawnEnv(HostEnv, Protocol):
    """A `HostEnv` that draws images: of Gymnasium, or in JAX."""

    def render(self) -> tuple[Image, float | None]:
        """Return the image `[H, W, 3]` of the first environment, and its frames per second or None."""
        ...


@dataclass(frozen=True)
class Frame:
    """One time step of an episode.

    Attributes:
        image: the environment's image, `[H, W, 3]`.
        fps: frames per second of the environment, or None if it does not say.
        episode: number of the episode, from 0.
        step: number of the step in its episode.
        reward: reward of the step that led here; 0 at the start.
        total: sum of the rewards so far.
        value: the policy's estimate of the discounted return from here; None at the end, and if it is not computed.
        is_last: the episode ends here.
    """

    image: Image
    fps: float | None
    episode: int
    step: int
    reward: float
    total: float
    value: float | None
    is_last: bool

    def describe(self, name: Number) -> str:
        """Return one of `NUMBERS` as text, such as `reward 1.00`."""
        if name == "step":
            return f"step {self.step}"
        value = {"reward": self.reward, "return": self.total, "value": self.value}[name]
        return f"{name} {NOTHING if value is None else format_number(value)}"


def check_numbers(owner: str, show: Any) -> tuple[Number, ...]:
    """Check the names of numbers that frames show.

    Raises:
        TypeError, ValueError: it is no sequence of `NUMBERS`.
    """
    if isinstance(show, str) or not isinstance(show, Sequence):
        raise TypeError(f"{owner}: show must be a list of {', '.join(NUMBERS)}, got {show!r:.80}")
    for name in show:
        check_choice(owner, "each of show", name, NUMBERS)
    return tuple(dict.fromkeys(show))


def check_images(owner: str, env: Env | HostEnv) -> None:
    """Check that an environment draws images, by drawing one; a host environment is reset.

    Raises:
        ValueError: it draws none, or has several copies.
        RuntimeError, ImportError: a library with which it draws is missing.
    """
    drawn = drawn_env(owner, env, jax.random.key(0))
    drawn.reset(0)
    drawn.render()


def drawn_env(owner: str, env: Env | HostEnv, key: PRNGKeyArray) -> DrawnEnv:
    """Return an environment that `play` takes: an environment in JAX is stepped from the host.

    Raises:
        ValueError: the environment draws no images, or is several on the host.
    """
    hosted = env if isinstance(env, HostEnv) else JaxEnvOnHost(single_copy(env), key)
    if not isinstance(hosted, DrawnEnv):
        raise ValueError(f"{owner}: env must draw images: have a method render(), got {type(env).__name__}")
    if isinstance(env, HostEnv) and env.num_envs != 1:
        raise ValueError(f"{owner}: env must be created with num_envs=1, got {env.num_envs}")
    return hosted


def play(
    owner: str,
    policy: Policy,
    env: Env | HostEnv,
    *,
    key: PRNGKeyArray,
    episodes: int | None,
    max_steps: int,
    has_value: bool = False,
) -> Iterator[Frame]:
    """Yield a frame for every time step of whole episodes, the same ones that `polyak.train.evaluate` plays with this key.

    Args:
        owner: name of the caller in errors and warnings.
        policy: the policy, with its arrays on one device.
        env: an environment that draws images.
        key: source of all randomness.
        episodes: number of episodes; None plays on without an end.
        max_steps: maximum number of steps of an episode; the video ends at a longer one, with a warning.
        has_value: compute the values of the frames.

    Raises:
        ValueError: the environment draws no images, or does not fit the policy; or the policy has no value.
    """
    env_key, act_key = jax.random.split(key)
    drawn = drawn_env(owner, env, env_key)
    check_spec(owner, getattr(policy, "spec", env.spec), env.spec, "policy")
    actor = make_actor(with_value(owner, policy) if has_value else policy, act_key, 1, exact=True, block=BLOCK)
    time_step, carry = drawn.reset(host_seed(env_key) if isinstance(env, HostEnv) else 0), policy.initial_state(1)
    episode = step = 0
    total = 0.0
    with ExceptionRelay(policy):
        for t in itertools.count():
            record = jax.tree.map(lambda x: np.asarray(x)[0], time_step.episode_record)
            reward, is_last = float(record.reward), bool(record.last)
            step, total = (0, 0.0) if record.first else (step + 1, total + reward)
            now = Frame(*drawn.render(), episode, step, reward, total, None, is_last)
            if is_last and episode + 1 == episodes:
                yield now
                return
            acted = actor(t, time_step, carry)
            check_error_flags(acted.carry, ANY)
            # The end of an episode has no value.
            yield replace(now, value=float(np.asarray(acted.info["value"])[0])) if has_value and not is_last else now
            if step == max_steps and not is_last:
                warn(f"{owner}: the episode was cut after max_steps={max_steps:,} steps")
                return
            episode, carry = episode + is_last, acted.carry
            time_step = drawn.step(jax.tree.map(np.asarray, acted.action))


def with_value(owner: str, policy: Any) -> Policy:
    """Return the policy with `info["value"]` of each step.

    Raises:
        ValueError: the policy has no value, such as an actor with separate critics.
    """
    try:
        valued: Policy = with_info(policy, log_prob=False, value=True)
    except ValueError:
        raise ValueError(f"{owner}: show must be without 'value': the policy has none, its critics are separate") from None
    return valued
