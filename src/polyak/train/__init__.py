"""Training loops, evaluation and data collection, independent of the algorithm.

`collect` and `evaluate` are functions here and modules of the same names: `polyak.train.evaluate` is the function, and
`from polyak.train.evaluate import Evaluation` reads from the module.
"""

from collections.abc import Callable, Sequence

from jaxtyping import PRNGKeyArray

from polyak.core.types import Agent, Callback, Env, HostEnv
from polyak.train.collect import collect
from polyak.train.compiled_loop import compiled, compiled_seeds
from polyak.train.evaluate import Evaluation, evaluate
from polyak.train.host_loop import host
from polyak.train.loop import LoopState, TrainingDiverged, TrainResult, default_devices, initial

__all__ = [
    "Evaluation",
    "LoopState",
    "TrainResult",
    "TrainingDiverged",
    "collect",
    "compiled",
    "compiled_seeds",
    "evaluate",
    "host",
    "initial",
    "run",
]


def run(
    agent: Agent,
    env: Env | HostEnv,
    *,
    env_steps: int,
    key: PRNGKeyArray,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    devices: int | None = None,
    resume_from: LoopState | None = None,
    env_steps_done: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train with `compiled` in a JAX environment and with `host` in any other; they document the arguments.

    Args:
        devices: number of devices. None selects two, as `polyak train` does, if JAX has two and the JAX environment has at
            least 64 copies; otherwise one. On a CPU, JAX creates `JAX_NUM_CPU_DEVICES` devices (default 1) at startup.
    """
    if devices is None:
        devices = default_devices(agent, env)
    if isinstance(env, HostEnv):
        return host(
            agent,
            env,
            env_steps=env_steps,
            key=key,
            callbacks=callbacks,
            report_every=report_every,
            devices=devices,
            resume_from=resume_from,
            env_steps_done=env_steps_done,
            should_stop=should_stop,
        )
    return compiled(
        agent,
        env,
        env_steps=env_steps,
        key=key,
        callbacks=callbacks,
        report_every=report_every,
        devices=devices,
        resume_from=resume_from,
        env_steps_done=env_steps_done,
        should_stop=should_stop,
    )
