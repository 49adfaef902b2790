"""What users of Stable-Baselines3 type in their first minute: each error names the right call."""

import functools
import importlib
import json
import re
from operator import attrgetter
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest

import polyak
from polyak import envs, loops, train
from polyak.agents import AGENTS, agent_class
from polyak.core.spaces import Box
from polyak.core.struct import struct
from polyak.core.suggestions import find_replacement, libraries
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from tests.loops.setting import AGENT, ENV, KEY

ROOT = Path(__file__).parents[1]

# Tests check signatures, which people do not.
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def result():
    return loops.compiled(AGENT, ENV, env_steps=40, key=KEY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ENV,), r"PPO: spec must be an EnvSpec, got the environment; pass env\.spec"),
        (
            ("MlpPolicy", ENV),
            r"PPO: spec must be an EnvSpec, got 'MlpPolicy'; .* \(networks are fields of the agent\)",
        ),
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
        ("batch_size", 64, r"num_minibatches of the agent, num_steps \* num_envs / batch_size .*microbatch_size is another"),
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
    for names in libraries().values():
        assert not {name for name in names["everywhere"] if name in polyak.PPO.__dataclass_fields__}


@pytest.mark.parametrize("loop", [loops.compiled, loops.host, train.run])
def test_training_with_the_arguments_of_learn(loop):
    with pytest.raises(TypeError, match="unknown argument 'total_timesteps' of Stable-Baselines3; use env_steps"):
        loop(AGENT, ENV, total_timesteps=100, key=KEY)
    with pytest.raises(TypeError, match="unknown argument 'env_step'; did you mean 'env_steps'"):
        loop(AGENT, ENV, env_step=100, key=KEY)


@pytest.mark.parametrize("loop", [loops.compiled, loops.host, train.run])
def test_training_with_an_integer_as_key(loop):
    with pytest.raises(TypeError, match=r"train: key must be a JAX key, got 7; pass key=jax\.random\.key\(7\)"):
        loop(AGENT, ENV, env_steps=100, key=7)


def test_training_several_seeds_with_integers_as_keys():
    with pytest.raises(TypeError, match=r"train: keys must be JAX keys .*jax\.random\.split\(jax\.random\.key\(0\), 2\)"):
        loops.compiled_seeds(AGENT, ENV, env_steps=100, keys=[0, 1])


def test_evaluating_an_agent_or_a_result(result):
    for wrong in (AGENT, result):
        with pytest.raises(TypeError, match=r"evaluate: policy must have .*; pass agent\.policy\(result\.state\)"):
            train.evaluate(wrong, ENV, episodes=1, key=KEY)
    with pytest.raises(TypeError, match=r"evaluate: key must be a JAX key, got 0"):
        train.evaluate(AGENT.policy(result.state), ENV, episodes=1, key=0)
    with pytest.raises(TypeError, match="unknown argument 'n_eval_episodes' of Stable-Baselines3; use episodes"):
        train.evaluate(AGENT.policy(result.state), ENV, n_eval_episodes=1, key=KEY)


def test_a_seed_where_a_key_is_taken():
    with pytest.raises(TypeError, match=r"evaluate: unknown argument 'deterministic' .* use policy=agent\.collect_policy"):
        train.evaluate(AGENT.policy(AGENT.init(KEY)), ENV, episodes=1, key=KEY, deterministic=False)
    policy, said = AGENT.policy(AGENT.init(KEY)), r"unknown argument 'seed' .* use key=jax\.random\.key\(seed\)"
    for call in (
        lambda: train.evaluate(policy, ENV, episodes=1, seed=1),
        lambda: loops.compiled(AGENT, ENV, env_steps=100, seed=1),
        lambda: train.collect(policy, ENV, 2, seed=1),
    ):
        with pytest.raises(TypeError, match=said):
            call()


@pytest.mark.parametrize("make", [polyak.MLP, polyak.NatureCNN, polyak.LSTM])
def test_a_network_with_the_names_of_stable_baselines3(make):
    with pytest.raises(TypeError, match=rf"{make.__name__}: unknown field 'net_arch' .* use hidden of the network"):
        make(net_arch=[64])


def test_agent_and_environment_the_other_way_round():
    for agent, env in ((ENV, AGENT), ("CartPole-v1", AGENT), (ENV, "ppo"), ("jax/CartPole-v1", "PPO")):
        with pytest.raises(TypeError, match=r"train\.run: agent and env are swapped: call train\.run\(agent, env\), got .*"):
            train.run(agent, env, env_steps=100)


@pytest.mark.parametrize(
    ("make", "name", "says"),
    [
        (polyak.Actor, "net_arch", "use hidden of the network"),
        (polyak.Actor, "log_std_init", "use log_std of the network"),
        (polyak.Actor, "hiden", "did you mean 'hidden'"),
        (polyak.Critics, "n_critics", "use num_critics of the network"),
        (polyak.Critics, "n_quantiles", "use num_quantiles of the agent"),
        (polyak.SAC, "net_arch", r"use actor=polyak\.Actor\(hidden\) and critics"),
        (polyak.TD3, "n_critics", r"use critics=polyak\.Critics\(num_critics"),
        (polyak.SAC, "share_features_extractor", "use shared_encoder"),
        (polyak.TQC, "n_quantiles", "use num_quantiles of the agent"),
    ],
)
def test_actors_and_critics_suggest_their_fields(make, name, says):
    with pytest.raises(TypeError, match=f"{make.__name__}: unknown field '{name}'.*{says}"):
        make(**{name: 1})


@pytest.mark.parametrize("method", ["policy", "collect_policy"])
def test_policy_of_a_result_or_a_loop_state(method, result):
    for wrong, name in ((result, type(result).__name__), (result.loop_state, "LoopState"), (0, "int")):
        with pytest.raises(AttributeError, match=f"'{name}' object has no attribute '(copies|obs_normalizer)'"):
            getattr(AGENT, method)(wrong)


def test_making_an_environment_with_other_names():
    with pytest.raises(TypeError, match="make: unknown argument 'n_envs' of Stable-Baselines3; use num_envs"):
        envs.make("CartPole-v1", n_envs=4)
    with pytest.raises(TypeError, match="make: unknown argument 'num_env'; did you mean 'num_envs'"):
        envs.make("CartPole-v1", num_env=4)


def test_a_key_may_be_raw_numbers():
    assert train.collect(AGENT.policy(AGENT.init(KEY)), ENV, 2, key=jax.random.PRNGKey(0)).reward.shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("buffer_size", "replay=polyak.UniformReplay"),
        ("target_update_interval", "target_period"),
        ("exploration_fraction", "epsilon="),
        ("n_steps", "n_step of"),
        ("policy_kwargs", r"network=polyak\.MLP\("),
    ],
)
def test_settings_of_dqn_in_stable_baselines3(name, instead):
    with pytest.raises(TypeError, match=f"DQN: unknown field '{name}' of Stable-Baselines3; use {instead}"):
        polyak.DQN(ENV.spec, **{name: 1})


@pytest.mark.parametrize(
    ("agent", "name", "instead"),
    [
        ("IQN", "policy_kwargs", r"network=polyak\.MLP\("),
        ("PPO", "features_extractor_class", r"network= of .* \(docs/tutorials/own-network\.md\)"),
        ("SAC", "features_extractor_class", r"actor= and critics= of .* \(docs/tutorials/own-network\.md\)"),
        ("SAC", "policy_kwargs", r"actor=polyak\.Actor\(.*critics=polyak\.Critics\("),
        ("SAC", "ent_coef", "alpha of the agent"),
        ("TD3", "action_noise", "exploration_noise of"),
        ("PPO", "gradient_steps", "num_epochs of"),
        ("TQC", "top_quantiles_to_drop_per_net", "dropped_quantiles of"),
    ],
)
def test_settings_of_other_agents_in_stable_baselines3(agent, name, instead):
    with pytest.raises(TypeError, match=f"{agent}: unknown field '{name}' of Stable-Baselines3; use {instead}"):
        getattr(polyak, agent)(ENV.spec, **{name: 1})


@pytest.mark.parametrize(
    ("agent", "name", "says"),
    [
        ("PPO", "importance_ratio_clipping", "of TF-Agents; use clip_range of the agent"),
        ("PPO", "actor_net", r"of TF-Agents; use network=polyak\.MLP\("),
        ("DQN", "target_update_tau", "of TF-Agents; use tau of the agent"),
        ("C51", "min_q_value", "of TF-Agents; use v_min of the agent"),
        ("SAC", "critic_network", r"of TF-Agents; use critics=polyak\.Critics\("),
        ("TD3", "actor_update_period", "of TF-Agents; use policy_delay of the agent"),
        ("DDPG", "ou_damping", "of TF-Agents; use theta of the agent"),
        ("DQN", "rate_for_copying_weights_to_target", "of RL Coach; use tau of the agent"),
        ("QRDQN", "atoms", "of RL Coach; use num_quantiles of the agent"),
    ],
)
def test_settings_of_tf_agents_and_rl_coach(agent, name, says):
    with pytest.raises(TypeError, match=f"^{agent}: unknown field '{name}' {says}"):
        getattr(polyak, agent)(ENV.spec, **{name: 1})


OF_AGENTS = {"policy", "policy_kwargs", "n_steps", "train_freq", "optimizer_class", "gradient_clipping", "discount"}
OF_AGENTS = OF_AGENTS.union(*(names for library in libraries().values() for names in library["by_field"].values()))
OF_AGENTS -= {"seed"}  # Of functions with a key.


PPOKL_FIELDS = tuple(polyak.PPOKL.__dataclass_fields__)


@pytest.mark.parametrize("algorithm", AGENTS)
def test_no_field_is_suggested_that_an_agent_does_not_have(algorithm):
    fields = tuple(agent_class(algorithm).__dataclass_fields__)
    for name in OF_AGENTS.difference(fields):
        found = find_replacement(name, fields, "field")
        known = PPOKL_FIELDS if found is not None and "PPOKL" in found[1] else fields
        assert found is None or re.search(r"(\w+)( of|=|$)", found[1])[1] in known, name


@pytest.mark.parametrize(
    ("agent", "name"),
    [("PPO", "buffer_size"), ("A2C", "gradient_steps"), ("A2C", "batch_size"), ("SAC", "n_epochs"), ("DQN", "ent_coef")],
)
def test_settings_of_stable_baselines3_without_a_counterpart(agent, name):
    with pytest.raises(TypeError, match=rf"^{agent}: unknown field '{name}' \(fields: "):
        getattr(polyak, agent)(ENV.spec, **{name: 1})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("buffer_size", "capacity of the replay"),
        ("ent_coef", r"ent_coef of the agent \(alpha of SAC and TQC\)"),
        ("batch_size", r"batch_size of the agent \(num_minibatches of PPO and PQN\)"),
        ("n_epochs", "num_epochs of the agent"),
        ("gradient_steps", r"updates_per_step of the agent, per transition \(num_epochs of PPO and PQN\)"),
    ],
)
def test_settings_of_agents_that_functions_get(name, instead):
    with pytest.raises(TypeError, match=f"train: unknown argument '{name}' of Stable-Baselines3; use {instead}$"):
        train.run(AGENT, ENV, env_steps=10, **{name: 5})


def test_environments_that_are_none_or_step_on_the_host():
    with pytest.raises(TypeError, match=r"id must be a name, a function .* or a gymnasium\.vector\.VectorEnv, got int"):
        train.run(AGENT, 3, env_steps=100, seed=0)
    with pytest.raises(TypeError, match=r"env must be created with polyak\.envs\.make\(\.\.\.\), got int"):
        loops.compiled(AGENT, 3, env_steps=100, key=KEY)
    host_env = polyak.envs.make("CartPole-v1")
    agent = polyak.PPO(host_env.spec)
    with pytest.raises(ValueError, match=r"loops\.compiled needs an environment in JAX .*, got CartPole-v1"):
        loops.compiled(agent, host_env, env_steps=100, key=KEY)
    with pytest.raises(ValueError, match=r"loops\.compiled_seeds needs an environment in JAX"):
        loops.compiled_seeds(agent, host_env, env_steps=100, keys=jax.random.split(KEY, 2))
    host_env.close()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("learn", r"polyak\.train\.run"),
        ("predict", r"result\.policy\.predict"),
        ("save", r"result\.save"),
        ("initialize", r"agent\.init"),
        ("save_replay_buffer", r"run_dir= of polyak\.train\.run, whose checkpoints hold the replay"),
    ],
)
def test_methods_of_models_of_other_libraries(name, instead):
    with pytest.raises(AttributeError, match=rf"'PPO' object has no attribute '{name}'; use .*{instead}"):
        getattr(AGENT, name)
    assert not hasattr(AGENT, name)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("update_target_network", r"update_target\(tau\)"),
        ("parallel_prediction", r"predict\(\["),
        ("apply_gradients_and_sync_networks", r"apply_and_sync\(\)"),
        ("target_network", r"variables\('target'\)"),
    ],
)
def test_verbs_of_coach_on_network_copies(name, instead):
    copies = AGENT.init(KEY).copies
    with pytest.raises(AttributeError, match=rf"'NetworkCopies' object has no attribute '{name}'; use .*{instead}"):
        getattr(copies, name)


@pytest.mark.parametrize(
    ("agent", "name", "instead"),
    [
        (polyak.PPO, "policy_gradient_rescaler", "advantages of the agent"),
        (polyak.A2C, "policy_gradient_rescaler", "gae_lambda of the agent"),
        (polyak.A2C, "num_steps_between_gradient_updates", "num_steps of the agent"),
        (polyak.PPOKL, "high_kl_penalty_coefficient", "kl_cutoff_coef of PPOKL"),
        (polyak.REINFORCE, "normalize_returns", "normalize_advantage of the agent"),
    ],
)
def test_settings_of_coach_and_tf_agents_agents_that_learn_from_rollouts(agent, name, instead):
    with pytest.raises(TypeError, match=f"{agent.__name__}: unknown field '{name}' of (RL Coach|TF-Agents); use {instead}"):
        agent(ENV.spec, **{name: 1})


@pytest.mark.parametrize("name", ["SacAgent", "TFPyPolicy", "PyDriver", "NetworkWrapper", "ClippedPPOAgentParameters"])
def test_classes_of_tf_agents_and_coach(name):
    with pytest.raises(AttributeError, match=rf"module 'polyak' has no attribute '{name}'; use .*polyak\.\w+"):
        getattr(polyak, name)


def test_attributes_of_environments_and_results(result):
    host_env = polyak.envs.make("CartPole-v1")
    for env in (ENV, host_env):
        with pytest.raises(AttributeError, match=r"has no attribute 'action_space'; use env\.spec\.action"):
            env.action_space  # noqa: B018
    host_env.close()
    trained = train.run(AGENT, ENV, env_steps=40, progress=False)
    with pytest.raises(AttributeError, match=r"'Result' object has no attribute 'predict'; use result\.policy\.predict"):
        trained.predict([0.0])
    with pytest.raises(AttributeError, match=r"'Result' object has no attribute 'animate'$"):
        trained.animate()
    with pytest.raises(TypeError, match=r"Result\.evaluate: unknown argument 'n_eval_episodes' of Stable-Baselines3"):
        trained.evaluate(n_eval_episodes=10)


@pytest.mark.parametrize("module", ["polyak", "polyak.train", "polyak.envs", "polyak.policies", "polyak.replay"])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("make_vec_env", r"polyak\.envs\.make"),
        ("evaluate_policy", "evaluate"),
        ("EvalCallback", r"eval_every, eval_env and eval_episodes of train.run \(docs/runs.md\)"),
        ("BaseCallback", r"callbacks=.* \(docs/tutorials/callback.md\)"),
        ("CheckpointCallback", r"run_dir and checkpoint_every of train.run \(docs/runs.md\)"),
        ("VecNormalize", "normalize_obs=True"),
        ("HerReplayBuffer", r"replay= of the agent, .*\(docs/replay.md\); there is no hindsight replay"),
        ("compiled", r"polyak\.loops\.compiled"),
        ("distributed", r"polyak\.train\.run\(agent, env, workers="),
    ],
)
def test_functions_of_other_modules(module, name, instead):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'; use .*{instead}"):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["polyak", "polyak.train", "polyak.envs", "polyak.policies", "polyak.replay"])
def test_names_that_no_library_has(module):
    found = importlib.import_module(module)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nope'; it has .*{found.__all__[-1]}$"):
        found.nope  # noqa: B018


def test_all_that_is_suggested_for_names_of_other_libraries_exists():
    text = json.dumps(libraries())
    names = set(re.findall(r"\bpolyak((?:\.\w+)+)", text))
    assert {".envs.make", ".train.run", ".loops.host"} <= names
    for name in names:
        attrgetter(name[1:])(polyak)
    for page in re.findall(r"docs/[\w/-]+\.md", text):
        assert (ROOT / page).is_file()


@pytest.mark.parametrize(
    ("name", "says"),
    [("mask", r"; did you mean 'action_mask'\? \(arguments: obs,"), ("episode_start", " of Stable-Baselines3; use first")],
)
def test_arguments_of_predict_by_other_names(name, says):
    greedy = AGENT.policy(AGENT.init(KEY))
    for policy in (greedy, polyak.policies.Uniform(ENV.spec)):
        with pytest.raises(TypeError, match=f"predict: unknown argument '{name}'{says}"):
            policy.predict(np.zeros(ENV.spec.obs.shape, np.float32), **{name: None})


def test_the_class_of_an_agent_and_other_things_in_its_place():
    for loop in (train.run, loops.compiled):
        with pytest.raises(TypeError, match=r"agent must be an agent, got the class PPO; pass PPO\(env\.spec\)"):
            loop(polyak.PPO, ENV, env_steps=100, key=KEY)
    with pytest.raises(TypeError, match="agent must be an agent or the name of an algorithm, such as 'ppo', got None"):
        train.run(None, ENV, env_steps=100)
    assert train.run("PPO", "jax/CartPole-v1", env_steps=20, num_envs=2, progress=False).stopped is None


def test_arguments_that_are_missing_or_have_no_name():
    with pytest.raises(TypeError, match="train: env_steps is missing; pass env_steps="):
        train.run(AGENT, ENV)
    with pytest.raises(TypeError, match="train: only agent and env can be passed without a name, got 10000 too"):
        train.run(AGENT, ENV, 10_000)
    with pytest.raises(TypeError, match=r"evaluate: key is missing; pass key=jax\.random\.key\(0\)"):
        train.evaluate(AGENT.policy(AGENT.init(KEY)), ENV, episodes=1)


@pytest.mark.parametrize("loop", [train.run, loops.compiled, polyak.resume])
def test_callbacks_that_are_none_are_rejected_before_anything_runs(loop, tmp_path):
    arguments = (tmp_path / "none",) if loop is polyak.resume else (AGENT, ENV)
    options = {} if loop is polyak.resume else {"env_steps": 100, "key": KEY}
    with pytest.raises(TypeError, match=r"callbacks must be a list of functions, got <function .*; pass callbacks=\[\.\.\.\]"):
        loop(*arguments, callbacks=lambda *_: True, **options)
    with pytest.raises(TypeError, match=r"callback <lambda> must be a function of \(progress, metrics, state\)"):
        loop(*arguments, callbacks=[lambda local, scope: True], **options)
    with pytest.raises(TypeError, match="callback str must be a function"):
        loop(*arguments, callbacks=["log"], **options)


def test_evaluating_in_an_environment_that_is_not_made(result):
    with pytest.raises(TypeError, match=r"evaluate: env must be created with polyak\.envs\.make\(\.\.\.\), got str"):
        train.evaluate(AGENT.policy(result.state), "jax/CartPole-v1", episodes=1, key=KEY)


@pytest.mark.parametrize("vector", [False, True])
def test_run_takes_an_environment_of_gymnasium_and_leaves_it_open(vector):
    env = gymnasium.make_vec("CartPole-v1", num_envs=2) if vector else gymnasium.make("CartPole-v1")
    result = train.run("ppo", env, env_steps=16, settings={"num_steps": 8, "num_minibatches": 1}, progress=False)
    assert result.env.num_envs == 1 + vector
    env.reset(seed=0)
    env.close()


def test_an_environment_without_spaces_or_of_another_package():
    class Bare(gymnasium.Env):
        pass

    with pytest.raises(TypeError, match=r"Bare: env 0 has no observation_space; set it to a gymnasium\.spaces\.Space"):
        envs.make(Bare)
    with pytest.raises(ValueError, match="if another package registers it, write 'package:Empty-5x5-v7'"):
        envs.make("Empty-5x5-v7")


@pytest.mark.parametrize("agent", [polyak.PPO, polyak.SAC])
def test_loading_with_the_class_of_an_agent(agent):
    for owner in (agent, agent(polyak.EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0])))):
        with pytest.raises(AttributeError, match=r"'load'; use polyak\.load_policy\(path\)"):
            owner.load("ppo_cartpole")


def test_a_field_of_another_library_name_stays_a_field():
    @struct
    class Cart:
        load: float

    assert Cart(2.0).load == 2.0


def test_environments_used_as_those_of_gymnasium():
    host_env, jax_env = envs.make("CartPole-v1"), JaxEnvOnHost(ENV, KEY)
    for env in (host_env, jax_env):
        with pytest.raises(TypeError, match=r"env\.reset: seed is missing; pass seed=0"):
            env.reset()
        with pytest.raises(TypeError, match="cannot unpack non-iterable TimeStep object"):
            obs, info = env.reset(seed=0)  # noqa: RUF059
    host_env.close()
    with pytest.raises(AttributeError, match=r"no attribute 'reset'; use state, time_step = env\.init\(key\)"):
        ENV.reset()


@pytest.mark.parametrize(
    ("make", "name", "owner"),
    [
        (polyak.MLP, "std", "head=polyak.PolicyAndValue(std=...)"),
        (polyak.NatureCNN, "dueling", "head=polyak.QValues(dueling=...)"),
        (polyak.LSTM, "num_tau", "head=polyak.Quantiles(num_tau=...)"),
        (functools.partial(polyak.PPO, ENV.spec), "kl_beta", "polyak.PPOKL(spec, kl_beta=...)"),
    ],
)
def test_a_setting_of_another_class_is_named_with_that_class(make, name, owner):
    with pytest.raises(TypeError, match=f"unknown field '{name}' of polyak.* use {re.escape(owner)}"):
        make(**{name: 1.0})
