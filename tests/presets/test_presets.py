"""Presets: each makes an agent for its environment, and trains as long as it says."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import polyak
from polyak.agents import action_scaling_of, agent_class, soft_actor
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.networks.feedforward import policy_settings
from polyak.ops import gradient_step
from polyak.presets import DEFAULT, PRESETS, Preset, preset
from polyak.presets.preset import LEARNED_ALPHA_SETTINGS, OPTIMIZER_SETTINGS, LinearOverTraining
from polyak.presets.spaces import SPACES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:builtin type")  # Box2D warns while it is imported, and dies where warnings are errors.
@pytest.mark.parametrize(("algorithm", "env_id"), PRESETS)
def test_a_preset_makes_an_agent_for_its_environment(algorithm, env_id):
    if env_id.startswith("gymnax/"):
        pytest.importorskip("gymnax")
    if env_id.startswith("playground/"):
        require_playground(env_id)
    if env_id.startswith("Fetch"):
        pytest.importorskip("gymnasium_robotics")
    found = PRESETS[algorithm, env_id]
    scaling = action_scaling_of(algorithm)
    env = polyak.envs.make(env_id.replace("...", "Pong-v5"), num_envs=found.num_envs, action_scaling=scaling)
    agent = agent_class(algorithm)(spec=env.spec, **found.settings(found.env_steps))
    agent.check(found.num_envs)
    getattr(env, "close", lambda: None)()  # environments in JAX have nothing to close


@pytest.mark.parametrize("found", PRESETS.values(), ids=map(str, PRESETS))
def test_a_preset_says_how_long_and_where_its_numbers_come_from(found):
    assert found.env_steps >= 5_000
    assert found.source not in ("", "own")


def test_schedules_last_as_long_as_the_training():
    settings = preset("ppo", "CartPole-v1").settings(12_345)
    assert settings["learning_rate"].env_steps == settings["clip_range"].env_steps == 12_345


def test_a_jax_environment_has_the_preset_of_the_same_task():
    assert preset("ppo", "jax/CartPole-v1") is preset("ppo", "CartPole-v1")


def test_the_name_of_an_algorithm_is_of_any_case():
    assert preset("PPO", "CartPole-v1") is PRESETS["ppo", "CartPole-v1"] and preset("Redq", "X-v0") is preset("redq", "X-v0")


def test_minatar_in_numpy_has_the_preset_of_the_same_game_in_jax():
    game = PRESETS["pqn", "gymnax/Breakout-MinAtar"]
    assert preset("pqn", "MinAtar/Breakout-v1") is preset("pqn", "MinAtar/Breakout-v0") is game
    assert preset("pqn", "MinAtar/Seaquest-v1") is preset("pqn", "MinAtar/") is DEFAULT


def test_all_atari_games_have_the_preset_of_the_details():
    assert preset("ppo", "ALE/Pong-v5") is preset("ppo", "ALE/MsPacman-v5") is PRESETS["ppo", "ALE/..."]
    assert preset("ppo", "ale_py:ALE/Pong-v5") is PRESETS["ppo", "ALE/..."]
    found = preset("ppo", "ALE/Pong-v5")
    assert (found.env_steps, found.num_envs) == (10_000_000, 8)
    assert found.settings(1000) == {
        "num_steps": 128,
        "num_epochs": 4,
        "num_minibatches": 4,
        "values_when": "collect",
        "learning_rate": polyak.Linear(2.5e-4, env_steps=1000),
        "clip_range": polyak.Linear(0.1, env_steps=1000),
        "ent_coef": 0.01,
    }


def require_playground(env_id):
    """Skip without MuJoCo Playground, or without the robot's files, which it downloads."""
    pytest.importorskip("mujoco_playground")
    from mujoco_playground import dm_control_suite
    from mujoco_playground._src import mjx_env

    if env_id.removeprefix("playground/") not in dm_control_suite.ALL_ENVS and not mjx_env.MENAGERIE_PATH.exists():
        pytest.skip("the robots of the MuJoCo Menagerie are not here")


@pytest.mark.slow
def test_presets_of_the_dm_control_suite_and_the_robots_are_those_of_playground():
    pytest.importorskip("mujoco_playground")
    from mujoco_playground import dm_control_suite, locomotion
    from mujoco_playground.config import dm_control_suite_params, locomotion_params

    presets = {env_id.removeprefix("playground/"): found for (_, env_id), found in PRESETS.items() if "playground/" in env_id}
    assert set(presets) == {*dm_control_suite.ALL_ENVS, *locomotion.ALL_ENVS}
    del presets["CartpoleBalance"]
    for name, found in presets.items():
        is_robot = name in locomotion.ALL_ENVS
        theirs = (locomotion_params if is_robot else dm_control_suite_params).brax_ppo_config(name)
        ours = found.values
        if is_robot:
            networks, network = theirs.network_factory, ours["network"]
            assert network["hidden"] == networks.policy_hidden_layer_sizes
            assert network["value_hidden"] == networks.value_hidden_layer_sizes
            assert ours.get("actor_obs", "state") == networks.policy_obs_key
            assert ours.get("critic_obs", "state") == networks.value_obs_key
            assert (theirs.reward_scaling, ours.get("normalize_reward")) == (1.0, None)
        assert (ours["clip_range"], ours["max_grad_norm"]) == (theirs.get("clipping_epsilon", 0.3), theirs.get("max_grad_norm"))
        assert (found.env_steps, found.num_envs) == (theirs.num_timesteps, theirs.num_envs)
        rollout = theirs.batch_size * theirs.num_minibatches * theirs.unroll_length
        assert ours["num_steps"] * found.num_envs == rollout and ours["num_minibatches"] == theirs.num_minibatches
        assert (ours["num_epochs"], ours["gamma"]) == (theirs.num_updates_per_batch, theirs.discounting)
        assert (ours["learning_rate"], ours["ent_coef"]) == (theirs.learning_rate, theirs.entropy_cost)
        assert theirs.action_repeat == 1 and ours["normalize_obs"] == theirs.normalize_observations


@pytest.mark.parametrize(
    ("name", "entry", "size"),
    [("Go1JoystickFlatTerrain", "privileged_state", 5), ("G1JoystickRoughTerrain", "privileged_state", 5),
     ("SpotFlatTerrainJoystick", "state", 3)],
)  # fmt: skip
def test_presets_of_robots_with_sensors_show_the_actor_these_alone(name, entry, size):
    found = PRESETS["ppo", f"playground/{name}"]
    obs = Dict({"state": Box([-9.0] * 3, [9.0] * 3), "privileged_state": Box([-9.0] * 5, [9.0] * 5)})
    agent = polyak.PPO(spec=EnvSpec(obs, Box([-1.0], [1.0])), **found.settings(found.env_steps))
    agent.check(found.num_envs)
    assert agent.num_steps * found.num_envs == 256 * 32 * 20
    assert (agent.actor_obs, agent.critic_obs) == (("state",), (entry,))
    kernels = jax.eval_shape(agent.init, jax.random.key(0)).copies.online.params
    assert {x.shape[0] for x in jax.tree.leaves(kernels) if x.ndim == 2} & {3, 5, 8} == {3, size}


@pytest.mark.parametrize("algorithm", ["dqn", "c51", "qrdqn", "iqn", "rainbow"])
def test_agents_of_action_values_store_single_frames_of_atari_games(algorithm):
    found = preset(algorithm, "ALE/Breakout-v5")
    settings = found.settings(found.env_steps)
    images = EnvSpec(Box(0, 255, (4, 84, 84), np.uint8), Discrete(4))
    agent = agent_class(algorithm)(images, **settings)
    assert (agent.replay.frame_stack, agent.learning_starts, agent.updates_per_step, agent.batch_size) == (4, 20_000, 0.25, 32)
    # Dopamine copies the target every 8,000 steps and decreases ε over 250,000.
    assert agent.target_period == 8_000 * agent.updates_per_step
    if algorithm != "rainbow":
        assert (agent.epsilon.end, agent.epsilon.env_steps) == (0.01, 250_000)
    replay = jax.eval_shape(agent.init, jax.random.key(0)).replay
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(replay)) < 3.6e9


@pytest.mark.parametrize("game", ["Breakout", "Asterix"])
def test_presets_of_minatar_are_those_of_dense_layers(game):
    found = preset("dqn", f"MinAtar/{game}-v1")
    assert found is PRESETS["dqn", f"gymnax/{game}-MinAtar"]
    settings = found.settings(1_000)
    assert settings["network"].norm == "layer" and settings["epsilon"].env_steps == 100


@pytest.mark.parametrize("env_id", ["gymnax/CartPole-v1", "Nowhere-v0", "CartPole-v0"])
def test_what_has_no_preset_gets_the_defaults(env_id):
    assert preset("ppo", env_id) is DEFAULT
    assert DEFAULT.settings(1) == {}


def test_noise_of_a_presets_network_follows_state_dependent_exploration():
    spec = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-1.0], [1.0]))
    checked = set()
    for (algorithm, env_id), found in PRESETS.items():
        if algorithm not in ("a2c", "ppo", "sac", "td3", "tqc") or env_id.startswith("ALE/"):
            continue
        if "actor_obs" in found.values or env_id.startswith("Fetch"):
            continue  # two networks; goals
        networks = {}
        for sample_freq in (None, 8):
            agent = agent_class(algorithm)(spec=spec, **found.settings(1_000, {"sde_sample_freq": sample_freq}))
            networks[sample_freq] = agent.network if algorithm in ("a2c", "ppo") else agent.actor
        assert networks[None].hidden == networks[8].hidden
        independent, dependent = (policy_settings(network) for network in networks.values())
        of_agent = {"td3": "fixed", "a2c": "free", "ppo": "free"}.get(algorithm, "state")
        assert independent.std == found.values.get("network", {}).get("std", of_agent)
        assert dependent.std == "sde"
        checked.add((algorithm, networks[8].hidden, dependent.log_std))
    assert {("tqc", (400, 300), -3.0), ("sac", (64, 64), -3.67), ("td3", (400, 300), -3.0), ("ppo", (64, 64), -1.0)} <= checked


def test_changed_settings_take_the_place_of_the_presets():
    found = preset("sac", "BipedalWalker-v3")
    actor = polyak.Actor((8,), std="sde")
    settings = found.settings(500, {"sde_sample_freq": 4, "actor": actor, "learning_rate": LinearOverTraining(0.1)})
    assert settings["actor"] is actor and settings["critics"] == polyak.Critics((256, 256), norm="layer")
    assert settings["learning_rate"] == polyak.Linear(0.1, env_steps=500)


def test_presets_and_agents_have_the_same_settings_of_a_learned_alpha():
    assert LEARNED_ALPHA_SETTINGS == soft_actor.LEARNED_ALPHA_SETTINGS
    assert set(LEARNED_ALPHA_SETTINGS) <= set(polyak.SAC.__dataclass_fields__) & set(polyak.CrossQ.__dataclass_fields__)


def test_fixed_alpha_leaves_out_the_presets_settings_of_a_learned_one():
    spec = EnvSpec(Box([-1.0] * 4, [1.0] * 4), Discrete(2))
    found = preset("sac", "CartPole-v1")
    assert found.values["target_entropy"] == 0.1
    agent = polyak.SAC(spec, **found.settings(1_000, {"alpha": 0.2}))
    assert agent.alpha == 0.2 and agent.target_entropy is None and agent.gamma == 0.98
    with pytest.raises(ValueError, match="target_entropy has no effect"):
        polyak.SAC(spec, **found.settings(1_000, {"alpha": 0.2, "target_entropy": 0.1}))


@pytest.mark.parametrize("changes", [{"target_entropy": -0.5}, {"initial_alpha": 0.3}, {"alpha_learning_rate": 1e-3}])
def test_settings_of_a_learned_alpha_leave_out_the_presets_fixed_one(changes):
    spec = EnvSpec(Box([-1.0] * 2, [1.0] * 2), Box([-1.0], [1.0]))
    found = preset("sac", "MountainCarContinuous-v0")
    assert found.values["alpha"] == 0.1 == found.settings(1_000, {"target_entropy": None})["alpha"]
    agent = polyak.SAC(spec, **found.settings(1_000, changes))
    assert agent.alpha is None and agent.gamma == 0.9999
    assert {name: getattr(agent, name) for name in changes} == changes
    with pytest.raises(ValueError, match="has no effect with a fixed alpha"):
        polyak.SAC(spec, **found.settings(1_000, {"alpha": 0.1, **changes}))


def test_settings_without_effect_are_left_out_of_the_preset():
    spec = polyak.envs.make("jax/CartPole-v1").spec
    found = preset("dqn", "CartPole-v1")
    assert found.values["epsilon"] is not None
    assert polyak.DQN(spec, **found.settings(1_000, {"temperature": 1.0})).epsilon is None
    replay = polyak.UniformReplay(500)
    agent = polyak.C51(spec, **preset("rainbow", "CartPole-v1").settings(1_000, {"replay": replay, "temperature": 0.5}))
    assert (agent.replay, agent.epsilon, agent.n_step) == (replay, None, 3)


def test_flash_sac_leaves_out_what_other_exploration_and_normalization_do_not_use(recwarn):
    spec, found = EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0])), preset("flash_sac", "jax/Pendulum-v1")
    agent = polyak.XQC(spec, **found.settings(1_000, {"sde_sample_freq": 8}))
    assert (agent.actor.std, agent.actor.log_std, agent.actor.squash_log_std) == ("sde", -3.0, False)
    assert (agent.max_noise_repeats, agent.max_return) == (None, 5.0)
    agents = [polyak.XQC(spec, **found.settings(1_000, {"normalize_reward": of})) for of in ("reward", None, "return")]
    assert [agent.max_return for agent in agents] == [None, None, 5.0]
    assert {agent.max_noise_repeats for agent in agents} == {16} and not recwarn


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn", "rainbow", "pqn"])
def test_another_optimizer_takes_the_place_of_the_presets(algorithm):
    sgd = optax.sgd(1e-3)
    settings = preset(algorithm, "CartPole-v1").settings(1_000, {"optimizer": sgd})
    assert agent_class(algorithm)(polyak.envs.make("jax/CartPole-v1").spec, **settings).optimizer is sgd


def test_presets_and_agents_have_the_same_settings_of_the_optimizers():
    assert (*gradient_step.ADAM_SETTINGS, *gradient_step.RMSPROP_SETTINGS, "weight_decay") == OPTIMIZER_SETTINGS


def test_another_optimizer_takes_the_place_of_a_presets_weight_decay():
    settings = Preset(1_000, 1, {"weight_decay": 0.1, "tau": 0.5}, "").settings(1_000, {"optimizer": optax.sgd(1e-3)})
    assert settings.keys() == {"optimizer", "tau"}


def test_noise_of_ornstein_and_uhlenbeck_takes_the_place_of_the_presets():
    settings = preset("ddpg", "Pendulum-v1").settings(1_000, {"theta": 0.2})
    assert "exploration" not in settings and settings["theta"] == 0.2


def test_rainbow_without_a_noisy_network_explores_by_epsilon():
    found, spec = preset("rainbow", "CartPole-v1"), polyak.envs.make("jax/CartPole-v1").spec
    plain, noisy = (
        polyak.C51(spec, **found.settings(1_000, {"network": polyak.MLP(head=polyak.QValues(noisy=on))}))
        for on in (False, True)
    )
    assert (plain.epsilon, noisy.epsilon) == (polyak.C51(spec).epsilon, 0.0)


def test_rainbow_is_c51_with_all_parts_in_every_environment():
    for env_id in ("CartPole-v1", "ALE/Breakout-v5", "Nowhere-v0"):
        settings = preset("rainbow", env_id).settings(1_000)
        assert settings["network"].head == polyak.QValues(dueling=True, noisy=True)
        assert settings["replay"].alpha == 0.5 and settings["replay"].beta == polyak.Linear(0.4, 1.0, 1_000)
        assert settings["double"] and settings["n_step"] == 3 and settings["epsilon"] == 0.0
    agent = agent_class("rainbow")(polyak.envs.make("jax/CartPole-v1").spec, **settings)
    assert isinstance(agent, polyak.C51) and agent.network.head.outputs == 51


@pytest.mark.parametrize("algorithm", ["redq", "droq"])
def test_redq_and_droq_are_sac_with_twenty_gradient_steps_in_every_environment(algorithm):
    for env_id in ("Pendulum-v1", "Hopper-v5", "Nowhere-v0"):
        settings = preset(algorithm, env_id).settings(1_000)
        agent = agent_class(algorithm)(EnvSpec(Box([-1.0] * 4, [1.0] * 4), Box([-1.0] * 3, [1.0] * 3)), **settings)
        assert isinstance(agent, polyak.SAC)
        assert (agent.num_target_critics, agent.updates_per_step, agent.policy_delay) == (2, 20.0, 20)
        critics = agent.critics
        drops_units = critics.num_critics == 2 and critics.norm == "layer" and 0 < critics.dropout <= 0.01
        assert drops_units if algorithm == "droq" else critics == polyak.Critics(critics.hidden, num_critics=10)
        assert (agent.target_entropy == -1.0) == (env_id == "Hopper-v5")


def test_sr_sac_is_sac_with_many_gradient_steps_and_resets_in_every_environment():
    for env_id, updates, resets in (("Pendulum-v1", 16, 3), ("Nowhere-v0", 32, 6)):
        found = preset("sr_sac", env_id)
        agent = agent_class("sr_sac")(EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0])), **found.settings(1_000))
        assert isinstance(agent, polyak.SAC) and agent.updates_per_step == updates and agent.alpha_loss == "alpha"
        assert agent.actor.squash_log_std and agent.actor.log_std == -4.0
        assert (found.env_steps - agent.learning_starts) * updates // agent.reset_period == resets


def test_bro_has_ten_gradient_steps_residual_blocks_and_resets_in_every_environment():
    for env_id, period in (("Hopper-v5", 2_500_000), ("Pendulum-v1", 25_000)):
        agent = polyak.BRO(EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0])), **preset("bro", env_id).settings(1_000))
        assert (agent.reset_period, agent.updates_per_step, agent.batch_size) == (period, 10.0, 128)
        assert agent.actor.residual == agent.critics.residual == "post_norm" and agent.actor.orthogonal


def test_simbav2_is_xqc_with_networks_on_hyperspheres_in_every_environment():
    for env_id in ("Pendulum-v1", "Hopper-v5", "Nowhere-v0"):
        settings = preset("simbav2", env_id).settings(1_000)
        agent = agent_class("simbav2")(EnvSpec(Box([-1.0] * 4, [1.0] * 4), Box([-1.0] * 3, [1.0] * 3)), **settings)
        assert isinstance(agent, polyak.XQC) and agent.weight_norm and agent.normalize_obs and agent.policy_delay == 1
        assert agent.actor.residual == agent.critics.residual == "hypersphere" and agent.critics.num_atoms == 101


def test_flash_sac_is_xqc_with_inverted_blocks_in_every_environment():
    spec = EnvSpec(Box([-1.0] * 4, [1.0] * 4), Box([-1.0] * 3, [1.0] * 3))
    for env_id, num_envs, steps in (("playground/Walker", 1024, 2), ("Hopper-v5", 1, 1), ("jax/Pendulum-v1", 64, 2)):
        found = preset("flash_sac", env_id)
        agent = polyak.XQC(spec, **found.settings(found.env_steps))
        assert agent.actor.residual == agent.critics.residual == "inverted" and agent.weight_norm and agent.policy_delay == 2
        assert (agent.max_noise_repeats, agent.max_return, agent.v_max, agent.tau) == (16, 5.0, 5.0, 0.01)
        assert found.num_envs == num_envs and agent.updates_per_step * num_envs == steps
        agent.check(num_envs)
    many = preset("flash_sac", "playground/Walker").settings(1_000)
    assert (many["replay"].capacity, many["learning_starts"], many["gamma"]) == (10_000_000, 100_000, 0.97)
    # The standard deviation of the authors' target entropy is 0.15.
    np.testing.assert_allclose(agent.default_target_entropy(None) / 3, 0.5 * np.log(2 * np.pi * np.e * 0.15**2), atol=0.03)
    fast = polyak.FastTD3(spec, **preset("fast_td3", "playground/Walker").settings(1_000))
    assert (fast.batch_size, fast.updates_per_step * 1024, fast.tau, fast.normalize_obs) == (32_768, 2, 0.1, True)


def test_the_spaces_of_studies_with_many_environments_hold_the_presets_numbers():
    for algorithm, agent in (("fast_td3", polyak.FastTD3), ("flash_sac", polyak.XQC)):
        for env_id in ("playground/Walker", "Pendulum-v1"):
            values, space = preset(algorithm, env_id).values, SPACES[algorithm]
            tau = values.get("tau", agent.__dataclass_fields__["tau"].default)
            assert values["batch_size"] in space["batch_size"] and space["tau"]["low"] <= tau <= space["tau"]["high"]


def test_the_rates_of_xqc_fall_with_the_steps_of_each_network():
    found, spec = preset("xqc", "Hopper-v5"), EnvSpec(Box([-1.0] * 4, [1.0] * 4), Box([-1.0] * 3, [1.0] * 3))
    agent = polyak.XQC(spec, **found.settings(1_000))
    # The actor takes a third of the critics' steps: its rate falls by a third of the nine tenths.
    assert agent.learning_rate == polyak.Linear(3e-4, 3e-5, 1_000) and agent.policy_delay == 3
    end = 3e-4 - (3e-4 - 3e-5) / agent.policy_delay
    for rate in (agent.actor_learning_rate, agent.alpha_learning_rate):
        assert (rate.start, rate.env_steps) == (3e-4, 1_000) and rate.end == pytest.approx(end)
    changed = polyak.XQC(spec, **found.settings(1_000, {"learning_rate": 1e-3}))
    assert changed.actor_learning_rate is None is changed.alpha_learning_rate, "one learning rate is of all networks"
    assert polyak.XQC(spec, **found.settings(1_000, {"alpha": 0.1})).alpha_learning_rate is None
    kept = found.settings(1_000, {"learning_rate": 1e-3, "actor_learning_rate": 1e-4})
    assert (kept["actor_learning_rate"], "alpha_learning_rate" in kept) == (1e-4, False)
    assert preset("cql", "Hopper-v5").settings(1, {"learning_rate": 1e-3})["actor_learning_rate"] == 1e-4


def test_presets_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.env_steps = 1
    assert dataclasses.replace(DEFAULT, env_steps=5) == Preset(5, 8, DEFAULT.values, DEFAULT.source)
