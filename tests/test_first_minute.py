"""What users of Stable-Baselines3 type in their first minute: each error names the right call."""

import gymnasium
import jax
import pytest

import polyak
from polyak import envs, train
from polyak.core.names import STABLE_BASELINES
from tests.loops.setting import AGENT, ENV, KEY

# Tests check signatures, which people do not.
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def result():
    return train.compiled(AGENT, ENV, env_steps=40, key=KEY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ENV,), r"PPO: spec must be an EnvSpec, got the environment; pass env\.spec"),
        (("MlpPolicy", ENV), r"PPO: spec must be an EnvSpec, got 'MlpPolicy'; .* env\.spec \(a network is set with network=\)"),
        (("MlpPolicy", "CartPole-v1"), r"got 'MlpPolicy'; create env = polyak\.envs\.make\(\.\.\.\)"),
        ((gymnasium.make("CartPole-v1"),), r"got a Gymnasium environment; create env = polyak\.envs\.make"),
    ],
)
def test_agent_of_something_else_than_a_spec(arguments, message):
    with pytest.raises(TypeError, match=message):
        polyak.PPO(*arguments)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("batch_size", 64, r"num_minibatches = num_steps \* num_envs / batch_size .*microbatch_size is something else"),
        ("n_steps", 2048, "num_steps"),
        ("n_epochs", 4, "num_epochs"),
        ("policy", "MlpPolicy", "network="),
        ("policy_kwargs", {"net_arch": [64]}, "network="),
        ("env", ENV, r"env\.spec"),
        ("verbose", 1, "progress of train.run"),
        ("tensorboard_log", "logs", "run_dir of train.run"),
        ("seed", 0, "seed of train.run"),
        ("device", "cuda", "JAX_PLATFORMS"),
    ],
)
def test_settings_of_stable_baselines3(name, value, instead):
    with pytest.raises(TypeError, match=f"PPO: unknown field '{name}' of Stable-Baselines3; use .*{instead}"):
        polyak.PPO(ENV.spec, **{name: value})


def test_the_translations_name_no_field_of_the_agent_itself():
    assert not {name for name in STABLE_BASELINES if name in polyak.PPO.__dataclass_fields__}


@pytest.mark.parametrize("loop", [train.compiled, train.host, train.run])
def test_training_with_the_arguments_of_learn(loop):
    with pytest.raises(TypeError, match="unknown argument 'total_timesteps' of Stable-Baselines3; use env_steps"):
        loop(AGENT, ENV, total_timesteps=100, key=KEY)
    with pytest.raises(TypeError, match="unknown argument 'env_step'; did you mean 'env_steps'"):
        loop(AGENT, ENV, env_step=100, key=KEY)


@pytest.mark.parametrize("loop", [train.compiled, train.host, train.run])
def test_training_with_an_integer_as_key(loop):
    with pytest.raises(TypeError, match=r"train: key must be a JAX key, got 7; pass key=jax\.random\.key\(7\)"):
        loop(AGENT, ENV, env_steps=100, key=7)


def test_training_several_seeds_with_integers_as_keys():
    with pytest.raises(TypeError, match=r"train: keys must be JAX keys .*jax\.random\.split\(jax\.random\.key\(0\), 2\)"):
        train.compiled_seeds(AGENT, ENV, env_steps=100, keys=[0, 1])


def test_evaluating_an_agent_or_a_result(result):
    for wrong in (AGENT, result):
        with pytest.raises(TypeError, match=r"evaluate: policy must have .*; pass agent\.policy\(result\.state\)"):
            train.evaluate(wrong, ENV, episodes=1, key=KEY)
    with pytest.raises(TypeError, match=r"evaluate: key must be a JAX key, got 0"):
        train.evaluate(AGENT.policy(result.state), ENV, episodes=1, key=0)
    with pytest.raises(TypeError, match="unknown argument 'n_eval_episodes' of Stable-Baselines3; use episodes"):
        train.evaluate(AGENT.policy(result.state), ENV, n_eval_episodes=1, key=KEY)


@pytest.mark.parametrize("method", ["policy", "collect_policy"])
def test_policy_of_a_result_or_a_loop_state(method, result):
    for wrong, attribute in ((result, "state"), (result.loop_state, "agent")):
        with pytest.raises(TypeError, match=rf"PPO.{method}: state must be a PPOState, got .*; pass its \.{attribute}"):
            getattr(AGENT, method)(wrong)
    with pytest.raises(TypeError, match=r"got int; agent\.init\(key\) returns one"):
        getattr(AGENT, method)(0)


def test_making_an_environment_with_other_names():
    with pytest.raises(TypeError, match="make: unknown argument 'n_envs' of Stable-Baselines3; use num_envs"):
        envs.make("CartPole-v1", n_envs=4)
    with pytest.raises(TypeError, match="make: unknown argument 'num_env'; did you mean 'num_envs'"):
        envs.make("CartPole-v1", num_env=4)


def test_a_key_may_be_raw_numbers():
    assert train.collect(AGENT.policy(AGENT.init(KEY)), ENV, 2, key=jax.random.PRNGKey(0)).reward.shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("buffer_size", "capacity"), ("target_update_interval", "period"), ("exploration_fraction", "epsilon=")],
)
def test_settings_of_dqn_in_stable_baselines3(name, instead):
    with pytest.raises(TypeError, match=f"DQN: unknown field '{name}' of Stable-Baselines3; use {instead}"):
        polyak.DQN(ENV.spec, **{name: 1})


def test_environments_that_are_none_or_step_on_the_host():
    with pytest.raises(TypeError, match=r"env must be created with polyak\.envs\.make\(\.\.\.\), got int"):
        train.run(AGENT, 3, env_steps=100, seed=0)
    host_env = polyak.envs.make("CartPole-v1")
    agent = polyak.PPO(host_env.spec)
    with pytest.raises(ValueError, match=r"train\.compiled needs an environment in JAX .*, got CartPole-v1"):
        train.compiled(agent, host_env, env_steps=100, key=KEY)
    with pytest.raises(ValueError, match=r"train\.compiled_seeds needs an environment in JAX"):
        train.compiled_seeds(agent, host_env, env_steps=100, keys=jax.random.split(KEY, 2))
    host_env.close()
