"""Names in messages: suggestions for those that do not exist, and control characters made visible."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

STABLE_BASELINES = {
    "policy": "network=polyak.mlp(...) of the agent",
    "policy_kwargs": "network=polyak.mlp(hidden, activation) of the agent",
    "env": "env.spec as the agent's first argument; train.run(agent, env, ...) gets the environment",
    "n_steps": "num_steps of the agent",
    "batch_size": "num_minibatches = num_steps * num_envs / batch_size (microbatch_size is something else: it saves memory)",
    "n_epochs": "num_epochs of the agent",
    "buffer_size": "capacity of the agent",
    "train_freq": "num_steps of the agent",
    "gradient_steps": "updates_per_step of the agent, per transition",
    "target_update_interval": "period of the agent, in gradient steps",
    "exploration_fraction": "epsilon=polyak.Linear(start, end, env_steps) of the agent",
    "exploration_initial_eps": "epsilon=polyak.Linear(start, end, env_steps) of the agent",
    "exploration_final_eps": "epsilon=polyak.Linear(start, end, env_steps) of the agent",
    "optimizer_class": "optimizer=, an optax.GradientTransformation",
    "total_timesteps": "env_steps of train.run",
    "callback": "callbacks=[...] of train.run",
    "log_interval": "report_every of train.run, in env_steps",
    "reset_num_timesteps": "resume_from of train.run",
    "progress_bar": "progress of train.run",
    "verbose": "progress of train.run",
    "tensorboard_log": "run_dir of train.run, which holds TensorBoard's files too",
    "seed": "seed of train.run",
    "device": "JAX's own choice of a device (the environment variable JAX_PLATFORMS)",
    "model": "policy=agent.policy(result.state)",
    "n_eval_episodes": "episodes of train.evaluate",
    "n_envs": "num_envs of envs.make",
    "env_id": "id of envs.make",
    "vec_env_cls": "vectorization='async' of envs.make",
}
"""Where polyak has what an argument of Stable-Baselines3 sets."""


def unknown_name(name: str, known: Iterable[str], what: str) -> str:
    """The sentence for a name that does not exist: the name, what to use instead, and the names that do exist.

    >>> unknown_name("gama", ("gamma", "tau"), "field")
    "unknown field 'gama'; did you mean 'gamma'? (fields: gamma, tau)"
    >>> unknown_name("n_steps", ("num_steps",), "field")
    "unknown field 'n_steps' of Stable-Baselines3; use num_steps of the agent"
    """
    known = tuple(known)
    if name in STABLE_BASELINES and what in ("field", "argument"):
        return f"unknown {what} {name!r} of Stable-Baselines3; use {STABLE_BASELINES[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{hint} ({what}s: {', '.join(known)})"


def suggest_arguments(owner: str) -> Callable[[F], F]:
    """Wrap a function so that the error for an unknown keyword argument suggests the right one."""

    def decorate(function: F) -> F:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in names:
                    raise TypeError(f"{owner}: {unknown_name(name, names, 'argument')}")
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def escape_control(text: str) -> str:
    r"""`text` with control characters escaped, so that a name from a file cannot rewrite the user's terminal.

    >>> escape_control("run\x07")
    'run\\x07'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
