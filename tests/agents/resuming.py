"""An agent with a replay that is saved in the middle of a training and resumed, against one that is not interrupted."""

import jax
import pytest

import polyak
from polyak.storage.checkpoint import restore, save
from tests.agents.test_actor_critics import equal

KEY = jax.random.key(0)

in_both_loops = pytest.mark.parametrize(("loop", "devices"), [("compiled", 2), ("host", 1)])


def check_resuming(agent_for, env_name, loop, devices, directory, **env_options):
    """Check that a training of 256 env_steps has the same bits after a checkpoint at 128.

    Args:
        agent_for: a function of the spec that returns the agent.
        env_name: the environment outside of JAX; with `jax/` before it for the compiled loop.
    """
    name = f"jax/{env_name}" if loop == "compiled" else env_name
    env, again = (polyak.envs.make(name, num_envs=4, **env_options) for _ in range(2))
    agent, run = agent_for(env.spec), getattr(polyak.loops, loop)
    options = {"key": KEY} | ({"devices": devices} if loop == "compiled" else {})
    whole = run(agent, env, env_steps=256, **options)
    assert int(whole.state.updates) > 0
    half = run(agent, again, env_steps=128, **options)
    save(directory / "checkpoints", half.loop_state, step=128, meta={}, segmented=".agent.replay")
    restored = restore(directory / "checkpoints", half.loop_state).tree
    if loop == "host":
        snapshot = again.snapshot()
        again.reset(0)
        again.restore(snapshot)
    resumed = run(agent, again, env_steps=256, **options, resume_from=restored, env_steps_done=half.progress.env_steps)
    assert equal(whole.state, resumed.state)
