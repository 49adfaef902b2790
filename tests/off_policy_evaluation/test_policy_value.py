"""`polyak.evaluate_offline`: values of a small MDP by every estimator, spaces, memory, and bad input."""

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from polyak.core.struct import static, struct
from polyak.core.types import PolicyStep
from polyak.networks.critics import Critics
from polyak.off_policy_evaluation import FQE, FittedQ, action_log_probs, evaluate_offline, fitted_q, policy_value
from polyak.off_policy_evaluation.fitted_q import warn_of_impossible_values
from polyak.off_policy_evaluation.importance import ImportanceRatios, importance_sampling, weighted_importance_sampling
from polyak.off_policy_evaluation.policy_steps import compute_choices, read_steps
from polyak.ops.distributions import Categorical, Deterministic, Joint, Normal, bounded
from polyak.ops.distributions.exploration import Select
from polyak.ops.gradient_step import Aux
from polyak.policies import Greedy, Mixture, Uniform
from polyak.policies.noise import MixedNoise
from polyak.policies.repeated_noise import RepeatedNoise
from tests.off_policy_evaluation.mdp import ACTIONS, BEHAVIOR, GAMMA, SPEC, STATES, TARGET, Table, load, play, solve

QUICK = {"fqe": FQE(critics=Critics((32,)), gradient_steps=2_000), "resamples": 6}
EPISODES, HORIZON = 1_000, 4
Q, VALUE = solve(TARGET)
POLICY, FIRST = Table(TARGET), Table(np.eye(ACTIONS)[np.zeros(STATES, int)])


@pytest.fixture(scope="module")
def arrays():
    """Episodes of at most four steps, of which a third are cut short."""
    return play(BEHAVIOR, EPISODES, np.random.default_rng(0), HORIZON)


@pytest.fixture(scope="module")
def data(arrays):
    return load(arrays)


@pytest.fixture(scope="module")
def fitted(data):
    return polyak.evaluate_offline(POLICY, data, method="fqe", gamma=GAMMA, **QUICK)


def known_q(obs, action):
    return jnp.asarray(Q, jnp.float32)[obs, action]


def ratios_of(arrays, policy):
    last = np.flatnonzero(arrays["terminations"] | arrays["truncations"])
    ratio = np.log(policy / BEHAVIOR)[arrays["observations"], arrays["actions"]]
    return ImportanceRatios(arrays["rewards"], ratio, np.diff(last, prepend=-1), GAMMA)


@pytest.mark.slow
def test_fqe_finds_the_value_of_complete_episodes_in_ones_that_were_cut_short(data, fitted):
    assert data.truncated.mean() > 0.2 and solve(TARGET, horizon=HORIZON)[1] < 0.75 * VALUE
    assert abs(fitted.value - VALUE) < 0.1 * VALUE and fitted.low < VALUE < fitted.high
    assert abs(fitted.value - solve(BEHAVIOR)[1]) > fitted.standard_error
    # As episodes of the policy itself would tell, within a factor of two or three.
    assert 0.01 * VALUE < fitted.standard_error < 0.06 * VALUE
    obs, action = (x.ravel() for x in np.meshgrid(np.arange(STATES), np.arange(ACTIONS), indexing="ij"))
    learned = np.asarray(fitted.q(jnp.asarray(obs), jnp.asarray(action))).reshape(Q.shape)
    assert np.abs(learned - Q).max() < 0.3 * VALUE and np.abs(learned - Q).mean() < 0.1 * VALUE


@pytest.mark.slow
def test_equal_seeds_give_equal_estimates_and_q_can_be_used_again(data, fitted, monkeypatch):
    # The number of gradient steps in a call of the program depends on the clock.
    monkeypatch.setattr("polyak.off_policy_evaluation.fitted_q.CHUNK_SECONDS", 0.02)
    again = polyak.evaluate_offline(POLICY, data, gamma=GAMMA, **QUICK)
    assert again.value == fitted.value and (again.low, again.high) == (fitted.low, fitted.high)
    other = polyak.evaluate_offline(POLICY, data, gamma=GAMMA, **QUICK, seed=1)
    assert other.value != fitted.value
    direct = polyak.evaluate_offline(POLICY, data, method="dm", gamma=GAMMA, q=fitted.q)
    assert direct.value == pytest.approx(fitted.value, rel=1e-5) and direct.standard_error < fitted.standard_error
    for options in ({"q": fitted.q}, {"fqe": QUICK["fqe"]}):
        robust = polyak.evaluate_offline(POLICY, data, method="dr", gamma=GAMMA, **options)
        assert abs(robust.value - VALUE) < 0.1 * VALUE and robust.low < VALUE < robust.high


@pytest.mark.slow
def test_fqe_reaches_the_level_of_a_long_horizon():
    # The reward is the action: the policy earns 0.9 a step, and the behavior 0.5.
    rng = np.random.default_rng(8)
    action = rng.integers(0, 2, 1_000)
    arrays = {"observations": np.zeros(1_000, int), "actions": action, "rewards": action, "terminations": np.zeros(1_000)}
    arrays |= {"truncations": np.arange(1_000) % 20 == 19, "next_observations": np.zeros(1_000, int)}
    spec = EnvSpec(Discrete(1), Discrete(2))
    fqe = FQE(critics=Critics((16,)), gradient_steps=2_000, tau=0.5, learning_rate=3e-3)
    policy = Table(np.array([[0.1, 0.9]]), spec)
    estimate = polyak.evaluate_offline(policy, polyak.data.load(arrays, spec=spec), gamma=0.995, fqe=fqe, resamples=5)
    assert estimate.value == pytest.approx(0.9 / 0.005, rel=0.03)


def test_importance_sampling_is_that_of_the_known_ratios(arrays, data):
    ratios = ratios_of(arrays, TARGET)
    for per_decision in (True, False):
        options = {"gamma": GAMMA, "per_decision": per_decision}
        estimate = polyak.evaluate_offline(POLICY, data, method="is", **options)
        values = importance_sampling(ratios, per_decision=per_decision).x
        assert estimate.value == pytest.approx(values.mean(), rel=1e-5)
        assert estimate.standard_error == pytest.approx(values.std() / np.sqrt(EPISODES), rel=0.1)
        weighted = weighted_importance_sampling(ratios, per_decision=per_decision).resample(np.ones((1, EPISODES)))[0]
        assert polyak.evaluate_offline(POLICY, data, method="wis", **options).value == pytest.approx(weighted, rel=1e-5)
    assert estimate.low < solve(TARGET, horizon=HORIZON)[1] < estimate.high and estimate.q is None
    assert 50 < estimate.effective_sample_size < EPISODES


def test_a_wrong_q_biases_the_direct_method_and_not_the_doubly_robust_one(data):
    wrong = lambda obs, action: 0.5 * known_q(obs, action)  # noqa: E731
    direct = polyak.evaluate_offline(POLICY, data, method="dm", q=wrong, gamma=GAMMA)
    assert direct.value == pytest.approx(
        0.5 * (TARGET * Q).sum(axis=1)[data.obs[data.starts[:-1] + np.arange(EPISODES)]].mean()
    )
    # Cut episodes are continued by Q, so those that end are for a Q that is wrong.
    complete = load(play(BEHAVIOR, EPISODES, np.random.default_rng(1)))
    robust = polyak.evaluate_offline(POLICY, complete, method="dr", q=wrong, gamma=GAMMA, behavior=Table(BEHAVIOR))
    assert robust.low < VALUE < robust.high and not direct.low < VALUE < direct.high
    exact = polyak.evaluate_offline(POLICY, data, method="dr", q=known_q, gamma=GAMMA, behavior=Table(TARGET))
    assert exact.low < VALUE < exact.high


def test_the_behavior_is_a_policy_or_the_log_probs_of_the_data(arrays, tmp_path):
    bare, behavior = load(arrays, "log_probs"), Table(BEHAVIOR)
    with pytest.raises(ValueError, match=r"evaluate_offline: method='wis' needs the probabilities .* pass behavior=POLICY"):
        polyak.evaluate_offline(POLICY, bare, method="wis")
    np.testing.assert_allclose(action_log_probs(behavior, bare), arrays["log_probs"], rtol=1e-5)
    stored = dataclasses.replace(bare, log_prob=action_log_probs(behavior, bare))
    polyak.data.save(stored, tmp_path / "data.npz")
    again = polyak.data.load(tmp_path / "data.npz")
    given = polyak.evaluate_offline(POLICY, bare, method="wis", behavior=behavior)
    assert (
        given == polyak.evaluate_offline(POLICY, again, method="wis") == polyak.evaluate_offline(POLICY, stored, method="wis")
    )
    half = again.select(np.arange(0, EPISODES, 2))
    assert len(half.log_prob) == half.num_transitions


@pytest.mark.filterwarnings("ignore::UserWarning")  # about metadata of the data set
def test_data_sets_of_minari_are_saved_without_log_probs(data, tmp_path, monkeypatch):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.warns(UserWarning, match="'mdp/random-v0' is saved without log_probs"):
        polyak.data.save(data.select([0, 1]), "minari:mdp/random-v0")


def test_a_deterministic_policy_of_discrete_actions_has_weights_of_its_own_episodes(arrays, data):
    greedy = np.eye(ACTIONS)[TARGET.argmax(axis=1)]
    estimate = polyak.evaluate_offline(Greedy(POLICY), data, method="is", gamma=GAMMA)
    with np.errstate(divide="ignore"):
        values = importance_sampling(ratios_of(arrays, greedy), per_decision=True).x
    assert estimate.value == pytest.approx(values.mean(), rel=1e-5)
    value = polyak.evaluate_offline(Greedy(POLICY), data, method="dm", gamma=GAMMA, q=known_q).value
    first = data.obs[data.starts[:-1] + np.arange(EPISODES)]
    assert value == pytest.approx((greedy * Q).sum(axis=1)[first].mean(), rel=1e-5)


def test_actions_that_the_policy_forbids_have_no_weight_even_of_an_infinite_q(data):
    masked = Table(np.where(np.arange(ACTIONS) == 1, 0.0, TARGET) / TARGET[:, [0, 2]].sum(axis=1, keepdims=True))
    endless = lambda obs, action: jnp.where(action == 1, 1e38, known_q(obs, action))  # noqa: E731
    estimate = polyak.evaluate_offline(masked, data, method="dm", gamma=GAMMA, q=endless)
    assert estimate.value < 2 * VALUE
    spec = dataclasses.replace(SPEC, has_action_mask=True)
    with pytest.raises(ValueError, match="has_action_mask is False, of mdp True"):
        polyak.evaluate_offline(dataclasses.replace(POLICY, spec=spec), data)


def test_poor_overlap_is_a_warning(arrays):
    always = np.full((STATES, ACTIONS), 1e-4)
    always[:, 0] = 1 - 2e-4
    few = load(play(BEHAVIOR, 9, np.random.default_rng(2)))
    with pytest.warns(UserWarning, match="has an effective sample size of .* of 9 episodes, below 10"):
        polyak.evaluate_offline(Table(always), few, method="wis")
    # A behavior that never takes some of the policy's actions: all weights are equal, and not 1.
    narrow = load(play(always * [1, 0, 0] + [0, 1e-12, 1e-12], 40, np.random.default_rng(3), horizon=1))
    with pytest.warns(UserWarning, match="importance weights of method='is' have mean"):
        polyak.evaluate_offline(Table(np.full((STATES, ACTIONS), 1 / 3)), narrow, method="is")


@struct
class Gaussian:
    """Acts by a normal distribution around the observation."""

    std: float
    spec: EnvSpec = static()
    slope: float = 1.0
    event_ndims: int = static(default=1)

    def initial_state(self, batch_size):
        return ()

    def distribution(self, time_step, carry=()):
        loc = self.slope * jnp.asarray(time_step.obs)
        return Normal(loc, jnp.full(loc.shape, self.std), self.event_ndims), carry

    def action(self, time_step, carry, key):
        return PolicyStep(self.distribution(time_step)[0].sample(seed=key), carry)


@pytest.fixture(scope="module")
def continuous():
    """Bandit episodes of one step: the reward is the executed action, which is often at a bound of 0.5."""
    rng = np.random.default_rng(7)
    obs = rng.uniform(-0.5, 0.5, (2_000, 1)).astype(np.float32)
    action = np.clip(obs + 0.5 * rng.normal(size=obs.shape), -0.5, 0.5).astype(np.float32)
    spec = EnvSpec(Box(-1.0, 1.0, (1,)), Box(-0.5, 0.5, (1,)), id="bandit")
    arrays = {"observations": obs, "actions": action, "rewards": (action + 1)[:, 0], "terminations": np.ones(len(obs), bool)}
    draws = np.clip(obs + 0.3 * rng.normal(size=(2_000, 200)), -0.5, 0.5)
    return polyak.data.load(arrays, spec=spec), Gaussian(0.5, spec), Gaussian(0.3, spec), 1 + draws.mean()


def test_clipped_gaussian_actions_have_probability_masses_on_the_bounds(continuous):
    data, behavior, policy, truth = continuous
    assert (np.abs(data.action) == 0.5).mean() > 0.3
    for method in ("is", "wis"):
        estimate = polyak.evaluate_offline(policy, data, method=method, behavior=behavior)
        assert estimate.low < truth < estimate.high and estimate.standard_error < 0.05
    # A policy that acts between -1 and 1, with densities of such actions.
    rescaled = Gaussian(0.6, dataclasses.replace(policy.spec, action_scaling="rescale"), 2.0)
    same = polyak.evaluate_offline(rescaled, data, method="is", behavior=behavior)
    assert same.value == pytest.approx(polyak.evaluate_offline(policy, data, method="is", behavior=behavior).value, rel=1e-4)
    linear = lambda obs, action: 1 + action[:, 0]  # noqa: E731
    robust = polyak.evaluate_offline(policy, data, method="dr", behavior=behavior, q=linear)
    assert robust.value == pytest.approx(truth, abs=0.02) and robust.standard_error < 0.02


@pytest.mark.slow
def test_fqe_of_box_actions_and_of_a_deterministic_policy(continuous):
    data, _, policy, truth = continuous
    short = {"fqe": dataclasses.replace(QUICK["fqe"], gradient_steps=1_000), "resamples": 5, "gamma": GAMMA}
    drawn = polyak.evaluate_offline(policy, data, method="fqe", **short)
    assert drawn.value == pytest.approx(truth, abs=0.03)
    mode = polyak.evaluate_offline(Greedy(policy), data, method="fqe", **short)
    assert mode.value == pytest.approx(1 + np.asarray(data.obs)[::2].mean(), abs=0.03)
    obs = jnp.array([[0.0], [0.2]])
    np.testing.assert_allclose(mode.q(obs, jnp.array([[0.4], [-0.4]])), [1.4, 0.6], atol=0.1)


def test_deterministic_policies_of_box_actions_and_policies_without_spec_are_errors(continuous):
    data, behavior, policy, _ = continuous
    without_spec = dataclasses.replace(policy, spec=None)
    for name, pair in (("policy", (without_spec, behavior)), ("behavior", (policy, without_spec))):
        with pytest.raises(ValueError, match=f"evaluate_offline: {name} must have a spec, which has the units of its Box"):
            polyak.evaluate_offline(pair[0], data, method="is", behavior=pair[1])
    for name, options in (("policy", {"behavior": behavior}), ("behavior", {"behavior": Greedy(behavior)})):
        with pytest.raises(ValueError, match=rf"{name} must have probabilities of actions, got a deterministic policy of Box"):
            polyak.evaluate_offline(Greedy(policy) if name == "policy" else policy, data, method="is", **options)


@struct
class Warming:
    """A uniform distribution in the rows with an observation below 0, else a normal one, in a Dict with a fixed gear."""

    spec: EnvSpec = static()

    def initial_state(self, batch_size):
        return ()

    def distribution(self, time_step, carry=()):
        obs = jnp.asarray(time_step.obs)
        uniform = bounded.Uniform(jnp.full(obs.shape, -0.5), jnp.full(obs.shape, 0.5), 1)
        turn = Select((uniform, Normal(obs, jnp.full(obs.shape, 0.5), 1)), (obs[:, 0] >= 0).astype(jnp.int32))
        return Joint({"gear": Deterministic(jnp.zeros(len(obs), jnp.int32)), "turn": turn}), carry

    def action(self, time_step, carry, key):
        return PolicyStep(self.distribution(time_step)[0].sample(seed=key), carry)


def test_actions_on_a_bound_need_a_probability_there(continuous):
    data, behavior, policy, _ = continuous
    is_inside = np.abs(data.action[:, 0]) < 0.5
    inside, uniform = data.select(np.flatnonzero(is_inside)), Uniform(data.spec)
    np.testing.assert_allclose(action_log_probs(uniform, inside), 0, atol=1e-6)
    first = (
        rf"got only a density of Uniform for the action of step 0 of episode {np.argmin(is_inside)}, which is on a bound of Box"
    )
    for name, pair in (("policy", (uniform, behavior)), ("behavior", (policy, uniform))):
        with pytest.raises(ValueError, match=f"evaluate_offline: {name} must have probabilities of actions, {first}"):
            polyak.evaluate_offline(pair[0], data, method="is", behavior=pair[1])
    agent = polyak.SAC(dataclasses.replace(policy.spec, action_scaling="rescale"))
    with pytest.raises(ValueError, match=r"action_log_probs: .* got only a density of .*; use method='fqe' or 'dm'"):
        action_log_probs(agent.collect_policy(agent.init(jax.random.key(0))), data)


def test_parts_of_an_action_may_be_deterministic_and_rows_have_distributions_of_their_own():
    obs, turn = np.array([-0.2, 0.2, 0.4, -0.4])[:, None], np.array([0.1, 0.5, -0.5, 0.3])[:, None]
    space = Dict({"gear": Discrete(2), "turn": Box(-0.5, 0.5, (1,))})
    policy = Warming(EnvSpec(Box(-1.0, 1.0, (1,)), space))
    arrays = {"observations": obs, "actions": {"gear": np.zeros(4, int), "turn": turn}, "rewards": np.ones(4)}
    arrays |= {"terminations": np.ones(4, bool)}
    phi = lambda z: statistics.NormalDist().cdf(z)  # noqa: E731
    data = polyak.data.load(arrays, spec=policy.spec)
    log_probs = action_log_probs(policy, data)
    np.testing.assert_allclose(np.exp(log_probs), [1, 1 - phi(0.6), phi(-1.8), 1], rtol=1e-4)
    count = compute_choices(read_steps("test", policy, data), jax.random.key(0), 10).probability.shape[1]
    assert count == 10  # as not all parts are deterministic
    arrays["actions"]["turn"] = turn[[1, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"step 0 of episode 0, which is on a bound of Box.* at action 'turn'"):
        action_log_probs(policy, polyak.data.load(arrays, spec=policy.spec))


def test_log_probs_of_another_shape_are_an_error(continuous):
    data, behavior, _, _ = continuous

    policy = Gaussian(0.3, behavior.spec, event_ndims=0)
    with pytest.raises(ValueError, match=r"policy must have .*, log_prob of shape \(2000,\) .*, got shape \(2000, 1\)"):
        polyak.evaluate_offline(policy, data.select(range(1_000)), method="is", behavior=behavior)


def test_integer_boxes_have_no_probabilities(continuous):
    spec = EnvSpec(Box(-1.0, 1.0, (1,)), Box(0, 4, (1,), np.int32))
    arrays = {"observations": np.zeros((8, 1)), "actions": np.arange(8)[:, None] % 5, "rewards": np.ones(8)}
    data = polyak.data.load(arrays | {"terminations": np.ones(8, bool)}, spec=spec)
    with pytest.raises(
        ValueError, match=r"must have probabilities of actions, got integers of Box.*; use method='fqe' or 'dm'"
    ):
        polyak.evaluate_offline(Uniform(spec), data, method="is", behavior=Uniform(spec))
    assert polyak.evaluate_offline(
        Uniform(spec), data, method="dm", q=lambda obs, action: obs[:, 0] + 1
    ).value == pytest.approx(1)


def test_a_policy_without_spec_must_have_the_number_of_actions_of_the_data(data):
    policy = Table(np.full((STATES, ACTIONS + 1), 0.25), spec=None)
    with pytest.raises(ValueError, match=f"policy must have the {ACTIONS} actions of the data, got {ACTIONS + 1}"):
        polyak.evaluate_offline(policy, data, method="dm", q=known_q)


def test_noisy_networks_and_heads_of_episodes_that_explore_are_errors():
    agent = polyak.DQN(SPEC, network=polyak.MLP((8,), head=polyak.QValues(noisy=True)))
    state = agent.init(jax.random.key(0))
    data = load(play(BEHAVIOR, 5, np.random.default_rng(0)))
    with pytest.raises(ValueError, match=r"must not act by draws or earlier actions of its own, .* got FreshNoise"):
        polyak.evaluate_offline(POLICY, data, method="is", behavior=agent.collect_policy(state))
    assert np.isfinite(action_log_probs(agent.policy(state), data)).any()
    heads = polyak.BootstrappedDQN(SPEC, network=polyak.MLP((8,)))
    with pytest.raises(ValueError, match=r"must not act by draws or earlier actions of its own, .* got EpisodeHead"):
        polyak.evaluate_offline(POLICY, data, method="is", behavior=heads.collect_policy(heads.init(jax.random.key(0))))


@pytest.mark.parametrize("noisy", [MixedNoise, RepeatedNoise])
def test_noise_that_is_drawn_for_several_steps_is_an_error(continuous, noisy):
    data, behavior, policy, _ = continuous
    with pytest.raises(ValueError, match=f"behavior must not act by draws .* of its own, .* got {noisy.__name__}"):
        polyak.evaluate_offline(policy, data, method="is", behavior=noisy(behavior))


def test_deterministic_actions_need_one_sample(continuous):
    data, _, policy, _ = continuous
    for each, count in ((policy, 10), (Greedy(policy), 1)):
        steps = read_steps("test", each, data)
        assert compute_choices(steps, jax.random.key(0), 10).probability.shape == (len(steps.time_steps.first), count)


@pytest.mark.slow
def test_a_flow_has_no_probabilities_and_can_be_evaluated_by_samples(continuous):
    data, behavior, policy, _ = continuous
    agent = polyak.BC(dataclasses.replace(policy.spec, action_scaling="rescale"), flow_steps=2)
    flow = agent.collect_policy(agent.init(jax.random.key(0)))
    for name, pair in (("policy", (flow, behavior)), ("behavior", (policy, flow))):
        with pytest.raises(ValueError, match=f"{name} must have probabilities of actions, got FlowPolicy: a flow policy"):
            polyak.evaluate_offline(pair[0], data, method="is", behavior=pair[1])
    with pytest.raises(ValueError, match="action_log_probs: policy must have probabilities of actions, got FlowPolicy"):
        action_log_probs(flow, data)
    linear = polyak.evaluate_offline(flow, data, method="dm", q=lambda obs, action: 1 + 0.5 * action[:, 0])
    assert 0.5 <= linear.low <= linear.high <= 1.5


@struct
class LastSeen:
    """A policy with memory: takes the first action where the observation is the one before, else the second."""

    spec: EnvSpec = static()

    def initial_state(self, batch_size):
        return jnp.full(batch_size, -1, jnp.int32)

    def distribution(self, time_step, carry):
        obs = jnp.asarray(time_step.obs, jnp.int32)
        before = jnp.where(jnp.asarray(time_step.first), -1, carry)
        probability = jnp.where((obs == before)[:, None], jnp.array([0.9, 0.1]), jnp.array([0.2, 0.8]))
        return Categorical(jnp.log(probability)), obs

    def action(self, time_step, carry, key):
        distribution, carry = self.distribution(time_step, carry)
        return PolicyStep(distribution.sample(seed=key), carry)


def test_memory_follows_the_recorded_episodes_and_begins_anew_with_each():
    obs, action = np.array([0, 0, 1, 1, 1, 0]), np.array([0, 0, 1, 0, 1, 1])
    ends = np.array([False, False, False, True, False, True])
    arrays = {"observations": obs, "actions": action, "rewards": np.ones(6), "terminations": ends}
    policy = LastSeen(EnvSpec(Discrete(2), Discrete(2)))
    data = polyak.data.load(arrays, spec=policy.spec)
    wanted = [0.2, 0.9, 0.8, 0.9, 0.8, 0.8]
    np.testing.assert_allclose(np.exp(action_log_probs(policy, data)), wanted, rtol=1e-5)


def test_combinations_are_one_choice_and_other_spaces_need_no_q(rng_data):
    spec, data = rng_data(MultiDiscrete((2, 3)))
    policy = Uniform(spec)
    q = lambda obs, action: (action @ jnp.array([10, 1])).astype(jnp.float32)  # noqa: E731
    assert polyak.evaluate_offline(policy, data, method="dm", q=q).value == pytest.approx(6.0, rel=1e-5)
    spec, data = rng_data(MultiBinary(2))
    assert polyak.evaluate_offline(Uniform(spec), data, method="is", behavior=Uniform(spec), gamma=1.0).value == pytest.approx(
        1.0
    )
    with pytest.raises(ValueError, match=r"FQE needs actions that are Discrete, .* or of Boxes, got MultiBinary"):
        polyak.evaluate_offline(Uniform(spec), data)


@pytest.fixture
def rng_data():
    def make(space):
        rng = np.random.default_rng(0)
        high = space.nvec if isinstance(space, MultiDiscrete) else 2
        arrays = {
            "observations": rng.normal(size=(20, 2)).astype(np.float32),
            "actions": rng.integers(0, high, (20, 2)),
            "rewards": np.ones(20),
            "terminations": np.ones(20, bool),
        }
        spec = EnvSpec(Box(-np.inf, np.inf, (2,)), space)
        return spec, polyak.data.load(arrays, spec=spec)

    return make


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "ips"}, ValueError, "method must be one of 'fqe', 'is', 'wis', 'dr', 'dm', got 'ips'"),
        ({"gamma": 1.01}, ValueError, r"gamma must be a number in \[0, 1\], got 1.01"),
        ({"gamma": "0.9"}, TypeError, "gamma must be a number"),
        ({"gamma": 1.0}, ValueError, r"gamma must be below 1 for FQE, as \d+ episodes were cut short"),
        ({"confidence": 0.9999}, ValueError, r"confidence must be a number in \(0, 0.999\]"),
        ({"resamples": 4}, ValueError, "resamples must be an integer >= 5"),
        ({"seed": -1}, ValueError, "seed must be an integer"),
        ({"method": "is", "per_decision": 1}, ValueError, "per_decision must be one of None, True, False"),
        ({"fqe": {"gradient_steps": 5}}, TypeError, r"fqe must be FQE\(...\) or None"),
        ({"fqe": FQE(gradient_steps=7_999)}, ValueError, r"gradient_steps=7999 must be in \[8000, .* gamma=0.99 and tau=0.05"),
        ({"method": "dr", "gamma": 1 - 1e-9}, ValueError, "gradient_steps=1000.* must be in"),
        ({"behavior": POLICY}, ValueError, "behavior must be left out with method='fqe'; it is for 'is' and 'wis' and 'dr'"),
        ({"per_decision": False}, ValueError, "per_decision must be left out with method='fqe'"),
        ({"method": "wis", "fqe": FQE()}, ValueError, "fqe must be left out with method='wis'; it is for 'fqe' and 'dr'"),
        ({"method": "dm", "q": known_q, "fqe": FQE()}, ValueError, "fqe must be left out with method='dm'"),
        ({"method": "dr", "q": known_q, "fqe": FQE()}, ValueError, "fqe must be left out with q"),
        ({"method": "is", "q": known_q}, ValueError, "q must be left out with method='is'"),
        ({"method": "dm"}, TypeError, "q must be a function of .* with method='dm', got None"),
        ({"method": "dm", "q": 3}, TypeError, "q must be a function of .* with method='dm', got 3"),
        ({"method": "dm", "q": lambda obs, action: obs[:, None]}, ValueError, "q must return one value for each of"),
        ({"method": "dm", "q": lambda obs, action: jnp.nan * known_q(obs, action)}, ValueError, "q returned NaN"),
        ({"method": "is", "behavior": lambda obs: obs}, TypeError, "behavior must have initial_state, distribution and action"),
        ({"method": "is", "behavior": FIRST}, ValueError, "probability 0 to the action of step"),
        ({"method": "dr", "behavior": Mixture((Uniform(SPEC),))}, ValueError, "behavior must not act by .* got Mixture"),
        ({"behaviour": POLICY}, TypeError, "behaviour"),
    ],
)
def test_bad_arguments_are_errors_before_anything_is_learned(data, options, error, message, monkeypatch):
    monkeypatch.setattr(policy_value, "fit", lambda *_: pytest.fail("it has learned"))
    with pytest.raises(error, match=message):
        polyak.evaluate_offline(POLICY, data, **options)


def test_data_and_policies_of_other_environments_are_errors(arrays, data):
    with pytest.raises(ValueError, match="is of another environment: action is Discrete"):
        polyak.evaluate_offline(Uniform(EnvSpec(Discrete(STATES), Discrete(ACTIONS + 1))), data)
    with pytest.raises(TypeError, match=r"data must be a data set of polyak\.data\.load or collect, got dict"):
        polyak.evaluate_offline(POLICY, arrays)
    with pytest.raises(TypeError, match="policy must have initial_state, distribution and action, got function"):
        polyak.evaluate_offline(lambda obs: 0, data)
    with pytest.raises(ValueError, match="cross-fitting needs 5 episodes, got 4"):
        polyak.evaluate_offline(POLICY, data.select(range(4)), method="dr")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:3], r"log_probs must .*3"),
        (lambda x: np.exp(x), r"log_probs must be in .*, 0\], got 0.* at \[0\]; they are logarithms of probabilities"),
        (lambda x: np.where(np.arange(len(x)) == 7, np.nan, x), "log_probs .*nan"),
        (lambda x: np.where(np.arange(len(x)) == 7, -np.inf, x), "log_probs .*-inf"),
    ],
)
def test_log_probs_are_checked_where_they_are_loaded_and_where_they_are_used(arrays, data, change, message):
    bad = change(arrays["log_probs"])
    with pytest.raises(ValueError, match=message):
        load(arrays | {"log_probs": bad})
    with pytest.raises(ValueError, match=f"evaluate_offline: the data set 'arrays': {message}"):
        polyak.evaluate_offline(POLICY, dataclasses.replace(data, log_prob=bad), method="is")


def test_an_estimate_without_weights_is_an_error(data):
    # Episodes whose first action is the policy's have a weight until their second step.
    long = data.select(np.flatnonzero((data.lengths > 1) & (data.action[data.starts[1:] - 1] != 0)))
    for method in ("is", "wis"):
        for per_decision in (True, False):
            with pytest.raises(ValueError, match="all importance weights are 0: the policy would have taken the actions of no"):
                polyak.evaluate_offline(FIRST, long, method=method, per_decision=per_decision)


def test_episodes_without_their_beginnings_are_left_out(data):
    has_beginning = np.arange(EPISODES) % 3 > 0
    partial = dataclasses.replace(data, has_beginning=has_beginning)
    estimate = polyak.evaluate_offline(POLICY, partial, method="wis")
    assert estimate == polyak.evaluate_offline(POLICY, data.select(has_beginning), method="wis")
    with pytest.raises(ValueError, match="no episode of the data set 'arrays' has its beginning"):
        polyak.evaluate_offline(POLICY, partial.select(~has_beginning))


def test_each_episode_is_corrected_by_a_critic_that_has_not_learned_from_it(data, monkeypatch):
    used = {}

    def fit(fqe, steps, choices, counts, gamma, key):
        used["counts"] = counts
        return object.__new__(FittedQ)

    def doubly_robust(ratios, value, q, next_value):
        used["critic"] = np.rint(value[ratios.starts]).astype(int)
        np.testing.assert_allclose(value, np.repeat(used["critic"], ratios.lengths), atol=1e-5)
        np.testing.assert_allclose(value, q, atol=1e-5)
        np.testing.assert_allclose(next_value, np.where(terminated, 0, value), atol=1e-5)
        return importance_sampling(ratios, per_decision=True)

    terminated = read_steps("test", POLICY, data).terminated
    monkeypatch.setattr(policy_value, "fit", fit)
    monkeypatch.setattr(policy_value, "doubly_robust", doubly_robust)
    numbers = jnp.arange(5, dtype=jnp.float32)
    monkeypatch.setattr(FittedQ, "all_critics", lambda self, obs, action: jnp.broadcast_to(numbers, (len(obs), 5)))
    polyak.evaluate_offline(POLICY, data, method="dr")
    assert used["counts"].shape == (5, EPISODES) and (used["counts"].sum(axis=0) == 4).all()
    assert (used["counts"][used["critic"], np.arange(EPISODES)] == 0).all()
    assert (used["counts"].sum(axis=1) == 0.8 * EPISODES).all()


def test_gradient_steps_follow_from_gamma_and_tau(data, arrays):
    steps = read_steps("test", POLICY, data)
    for gamma, tau, expected in ((0.9, 0.05, 10_000), (0.99, 0.05, 10_000), (0.999, 0.05, 100_000), (0.999, 0.5, 10_000)):
        assert FQE(tau=tau).for_data(steps, gamma, 1).gradient_steps == expected
    complete = load(play(BEHAVIOR, 50, np.random.default_rng(1)))
    longest = int(complete.lengths.max())
    steps = read_steps("test", POLICY, complete)
    assert FQE(gradient_steps=80 * longest).for_data(steps, 1.0, 1).gradient_steps == 80 * longest
    with pytest.raises(ValueError, match=f"gradient_steps={80 * longest - 1} must be in"):
        FQE(gradient_steps=80 * longest - 1).for_data(steps, 1.0, 1)


def test_gradient_steps_end_soon_after_one_that_is_not_finite(data, monkeypatch):
    counts = []
    program = fitted_q._program

    def record(*arguments):
        counts.append(int(arguments[-1]))
        return program(*arguments)

    monkeypatch.setattr(fitted_q, "_program", record)
    monkeypatch.setattr(
        fitted_q, "_loss", lambda params, index, **_: (jnp.nan * sum(map(jnp.sum, jax.tree.leaves(params))), Aux({}, {}))
    )
    fqe = dataclasses.replace(QUICK["fqe"], critics=Critics((3,)))
    with pytest.raises(FloatingPointError, match="FQE: 1 gradient steps were NaN or infinite"):
        polyak.evaluate_offline(POLICY, data, gamma=GAMMA, fqe=fqe, resamples=5)
    assert counts == [1]


@pytest.mark.filterwarnings("error")
def test_values_close_to_rewards_that_are_all_0_are_no_warning(data):
    steps = read_steps("test", POLICY, dataclasses.replace(data, reward=np.zeros_like(data.reward)))
    warn_of_impossible_values(np.array([[-1e-4, 1e-4]]), steps, GAMMA)
    with pytest.raises(UserWarning, match="the values of FQE reach"):
        warn_of_impossible_values(np.array([[0.01]]), steps, GAMMA)


def test_a_fitted_q_must_have_gamma_and_the_action_units_of_the_policy(continuous):
    data, behavior, policy, _ = continuous
    q = FittedQ(None, None, 0.0, 1.0, Critics(), dataclasses.replace(policy.spec, action_scaling="rescale"), 0.9)
    for options in ({"method": "dm"}, {"method": "dr", "behavior": behavior}):
        with pytest.raises(ValueError, match=r"gamma must be 0.9, with which q was learned, got 0.8"):
            polyak.evaluate_offline(policy, data, q=q, gamma=0.8, **options)
        with pytest.raises(ValueError, match=r"q must have the actions Box.* \(clip\), got Box.* \(rescale\)"):
            polyak.evaluate_offline(policy, data, q=q, gamma=0.9, **options)


def test_the_package_exports_the_function():
    assert evaluate_offline is polyak.evaluate_offline


def test_settings_of_fqe_are_checked():
    for settings, error, message in (
        ({"critics": "mlp"}, TypeError, r"FQE: critics must be Critics\(...\)"),
        ({"critics": Critics(num_quantiles=5)}, ValueError, "FQE: num_quantiles of critics must be None"),
        ({"critics": Critics(num_critics=5)}, ValueError, "FQE: num_critics of critics must be left out, .* got 5"),
        ({"gradient_steps": 0}, ValueError, "FQE: gradient_steps must be an integer"),
        ({"learning_rate": 0.0}, ValueError, "FQE: learning_rate must be a number"),
        ({"tau": 0.0}, ValueError, "FQE: tau must be a number"),
    ):
        with pytest.raises(error, match=message):
            FQE(**settings)


def test_it_prints_value_interval_and_effective_episodes(data):
    text = repr(polyak.evaluate_offline(POLICY, data, method="is", gamma=GAMMA, confidence=0.9, seed=2**32 - 1))
    assert text.startswith("Estimate(is: ") and ", 90 % interval [" in text
    assert "gamma 0.9, 1000 episodes, effective " in text
