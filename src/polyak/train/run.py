"""One name for training: the loop is found from the environment."""

from collections.abc import Callable, Sequence

from jaxtyping import PRNGKeyArray

from polyak.core.types import Agent, Callback, Env, HostEnv
from polyak.train.compiled_loop import compiled
from polyak.train.host_loop import host
from polyak.train.loop import LoopState, TrainResult


def run(
    agent: Agent,
    env: Env | HostEnv,
    *,
    env_steps: int,
    key: PRNGKeyArray,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    devices: int = 1,
    resume_from: LoopState | None = None,
    env_steps_done: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train: a JAX environment in the compiled loop, any other in the host loop. Arguments as in `compiled` and `host`."""
    loop = host if isinstance(env, HostEnv) else compiled
    return loop(
        agent,
        env,  # type: ignore[arg-type]
        env_steps=env_steps,
        key=key,
        callbacks=callbacks,
        report_every=report_every,
        devices=devices,
        resume_from=resume_from,
        env_steps_done=env_steps_done,
        should_stop=should_stop,
    )
