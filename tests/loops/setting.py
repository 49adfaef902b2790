"""What the tests of the loops train: a small agent in a small environment, in either loop."""

import jax
import jax.numpy as jnp
import numpy as np

from polyak import loops
from polyak.agents.ppo import PPO
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import CartPole
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import run_env_key
from polyak.networks.feedforward import MLP

NUM_ENVS, NUM_STEPS = 4, 8
# Initial states from a pool: what holds for a loop holds with it too.
ENV = AutoReset(CartPole(max_episode_steps=30), NUM_ENVS, reset_pool=2)
AGENT = PPO(
    ENV.spec,
    network=MLP((8,)),
    num_steps=NUM_STEPS,
    num_epochs=2,
    num_minibatches=2,
    learning_rate=1e-2,
    normalize_obs=True,
    normalize_reward="return",
    # A leaf that is an array: it must survive a loop that donates.
    gamma=jnp.float32(0.99),
)
KEY = jax.random.key(11)
LOOPS = {"compiled": loops.compiled, "host": loops.host}
# Twenty updates and more.
ENV_STEPS = 650


def hosted(snapshot=None):
    """The JAX environment as one that is stepped from outside, put back to a snapshot."""
    env = JaxEnvOnHost(ENV, run_env_key(KEY))
    if snapshot is not None:
        env.restore(snapshot)
    return env


def run(loop, env_steps=ENV_STEPS, env=ENV, agent=AGENT, **options):
    return LOOPS[loop](agent, env, env_steps=env_steps, key=options.pop("key", KEY), **options)


def goes_on(loop, result):
    """What a second call needs to go on where a result stopped."""
    options = {"resume_from": result.loop_state, "env_steps_done": result.progress.env_steps}
    return options if loop == "compiled" else options | {"env": hosted(result.progress.env.snapshot())}


def everything(result):
    """What two equal trainings agree about; a host loop's environment keeps its own state."""
    state = result.loop_state
    parts = (state.agent, state.time_step, state.carry, state.episodes, state.iteration)
    return jax.tree.map(np.asarray, (parts, jax.random.key_data(state.key)))
