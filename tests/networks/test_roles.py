"""Whose a weight is, found by reading the network's program, for built-in networks and users' own."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from polyak.agents.ppo_kl import PPOKL
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.networks.adapters import Equinox, FlaxLinen, FlaxNNX
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import LSTM
from polyak.networks.roles import _is_kernel, check_kernels, kernel_roles, roles, sum_of_squares

KEY = jax.random.key(0)
SPEC = EnvSpec(Box(-np.ones(3), np.ones(3)), Discrete(2))
BOX = EnvSpec(Box(-np.ones(3), np.ones(3)), Box(-np.ones((2, 2)), np.ones((2, 2))))


class OwnNNX(nnx.Module):
    """A torso for both, one for the value, and a layer that nothing is computed from."""

    def __init__(self, spec, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.torso = nnx.Linear(3, 4, rngs=rngs)
        self.critic = nnx.Linear(4, 4, rngs=rngs)
        self.policy = nnx.Linear(4, 2, rngs=rngs)
        self.value = nnx.Linear(4, 1, rngs=rngs)
        self.idle = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, obs):
        x = nnx.relu(self.torso(self.dropout(self.norm(obs))))
        return self.policy(x), self.value(nnx.relu(self.critic(x)))[..., 0]


class OwnLinen(linen.Module):
    @linen.compact
    def __call__(self, obs):
        x = linen.relu(linen.Dense(4, name="torso")(obs))
        return linen.Dense(2, name="policy")(x), linen.Dense(1, name="value")(obs)[..., 0]


class OwnEquinox(eqx.Module):
    """Jitted as a whole, with a convolution, whose bias has as many axes as its kernel."""

    conv: eqx.nn.Conv1d
    policy: eqx.nn.Linear
    value: eqx.nn.Linear

    def __init__(self, spec, key):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv1d(1, 2, 2, key=keys[0])
        self.policy = eqx.nn.Linear(4, 2, key=keys[1])
        self.value = eqx.nn.Linear(3, 1, key=keys[2])

    @eqx.filter_jit
    def __call__(self, obs):
        return self.policy(jax.nn.relu(self.conv(obs[None])).reshape(-1)), self.value(obs)[0]


def named(network, spec=SPEC):
    """The role of each parameter by its path."""
    variables = network.init(KEY, spec)
    tree = roles(network, variables, spec)
    assert jax.tree.structure(tree) == jax.tree.structure(variables.params)
    return {jax.tree_util.keystr(path): role for path, role in jax.tree_util.tree_leaves_with_path(tree)}


def of_part(found, part):
    parts = {role for path, role in found.items() if part in path}
    assert len(parts) == 1, (part, found)
    return parts.pop()


@pytest.mark.parametrize("std", ["free", "state"])
def test_separate_torsos_belong_to_their_heads(std):
    found = named(MLP((4, 3), head=PolicyAndValue(std=std)), BOX)
    assert of_part(found, "['actor']") == of_part(found, "['policy']") == "policy"
    assert of_part(found, "['critic']") == of_part(found, "['value']") == "value"


def test_a_shared_torso_belongs_to_both():
    found = named(MLP((4, 3), head=PolicyAndValue(shared_torso=True)))
    assert of_part(found, "['policy']") == "policy" and of_part(found, "['value']") == "value"
    assert {role for path, role in found.items() if "dense" in path} == {"shared"}


@pytest.mark.parametrize("shared", [False, True])
def test_a_memory_belongs_to_whom_it_serves(shared):
    found = named(LSTM(3, hidden=(2,), head=PolicyAndValue(shared_torso=shared)))
    assert of_part(found, "['actor']") == ("shared" if shared else "policy")
    assert shared or of_part(found, "['critic']") == "value"


def test_a_users_nnx_module_with_statistics_and_dropout():
    found = named(FlaxNNX(OwnNNX))
    wanted = {"norm": "shared", "torso": "shared", "critic": "value", "policy": "policy", "value": "value", "idle": "none"}
    assert {part: of_part(found, f"['{part}']") for part in wanted} == wanted


def test_a_users_linen_module():
    found = named(FlaxLinen(OwnLinen()))
    wanted = {"torso": "policy", "policy": "policy", "value": "value"}
    assert {part: of_part(found, f"['{part}']") for part in wanted} == wanted


def test_a_users_equinox_module_that_is_jitted_as_a_whole():
    found = named(Equinox(OwnEquinox))
    wanted = {".conv": "policy", ".policy": "policy", ".value": "value"}
    assert {part: of_part(found, part) for part in wanted} == wanted


COEFFICIENTS = {"policy": 0.1, "value": 0.2, "shared": 0.3}


@pytest.mark.parametrize(
    ("network", "spec"),
    [
        (MLP((4, 3), head=PolicyAndValue()), BOX),
        (MLP((4, 3), head=PolicyAndValue(shared_torso=True, std="state")), BOX),
        (FlaxNNX(OwnNNX), SPEC),
        (FlaxLinen(OwnLinen()), SPEC),
        (Equinox(OwnEquinox), SPEC),
    ],
    ids=["separate", "shared", "NNX", "Linen", "Equinox"],
)
def test_kernels_alone_have_a_role(network, spec):
    variables = network.init(KEY, spec)
    kernels, found = kernel_roles(network, variables, spec), named(network, spec)
    for (path, _), role in zip(jax.tree_util.tree_leaves_with_path(variables.params), kernels, strict=True):
        name = jax.tree_util.keystr(path)
        assert role == (found[name] if "kernel" in name or "weight" in name else None), name
    assert set(kernels) >= {"policy", "value"}


def test_the_penalty_is_the_sum_of_squares_of_a_roles_kernels():
    variables = MLP((4,), head=PolicyAndValue()).init(KEY, SPEC)
    kernels = kernel_roles(MLP((4,), head=PolicyAndValue()), variables, SPEC)
    params = jax.tree.map(lambda x: x + 1.0, variables.params)
    critic = [params["critic"]["dense"]["layers"][0]["kernel"], params["value"]["kernel"]]
    wanted = sum(float(np.sum(np.square(kernel))) for kernel in critic)
    assert float(sum_of_squares(params, kernels, "value")) == pytest.approx(wanted, rel=1e-6)
    assert float(sum_of_squares(params, kernels, "shared")) == 0.0


def test_without_a_coefficient_nothing_is_looked_for():
    check_kernels("PPO", MLP(head=PolicyAndValue()), SPEC, {})


@pytest.mark.parametrize(
    ("network", "setting", "said"),
    [
        (
            MLP((4,), head=PolicyAndValue()),
            "l2_shared",
            "l2_shared must be None for a network without shared kernels; it has policy, value",
        ),
        (
            LSTM(3, hidden=(2,), head=PolicyAndValue()),
            "l2_shared",
            "l2_shared must be None for a network without shared kernels; it has policy, value",
        ),
        (FlaxLinen(OwnLinen()), "l2_shared", "l2_shared must be None .* it has policy, value"),
        (FlaxNNX(OwnNNX), None, None),
        (MLP((4,), head=PolicyAndValue(shared_torso=True)), None, None),
        (MLP((), head=PolicyAndValue()), None, "l2_shared"),
    ],
)
def test_a_coefficient_of_kernels_that_there_are_not_is_refused_by_name(network, setting, said):
    if said is None:
        PPOKL(SPEC, network=network, l2_policy=0.1, l2_value=0.1, l2_shared=0.1)
        return
    with pytest.raises(ValueError, match=f"^PPOKL: {said}"):
        PPOKL(SPEC, network=network, **{setting or "l2_shared": 0.1})


@dataclasses.dataclass(frozen=True)
class Constant:
    """A policy that depends on nothing but a vector."""

    def init(self, key, spec):
        return Variables({"logits": jnp.zeros(2), "value": jnp.zeros((3, 1))})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        logits = jnp.broadcast_to(variables.params["logits"], (len(obs), 2))
        return (logits, (obs @ variables.params["value"])[:, 0]), carry, ()


def test_a_policy_without_kernels_has_none_to_punish():
    with pytest.raises(ValueError, match="l2_policy must be None for a network without policy kernels; it has value"):
        PPOKL(SPEC, network=Constant(), l2_policy=0.1)
    PPOKL(SPEC, network=Constant(), l2_value=0.1)


def test_l2_shared_needs_a_shared_torso_for_images():
    image = EnvSpec(Box(0, 255, (36, 36, 1), np.uint8), Discrete(2))
    PPOKL(image, network=NatureCNN((4,), head=PolicyAndValue()), l2_shared=0.1)
    with pytest.raises(ValueError, match="l2_shared"):
        PPOKL(image, network=NatureCNN((4,), head=PolicyAndValue(shared_torso=False)), l2_shared=0.1)


def test_a_kernel_is_known_by_its_own_name_not_by_its_modules():
    params = {"unbiased": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((2, 1))}, "log_std": {"all": jnp.ones((2, 2))}}
    found = {jax.tree_util.keystr(path): _is_kernel(path, x) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    assert [name for name, is_kernel in found.items() if is_kernel] == ["['unbiased']['kernel']"]


def test_the_logarithm_of_a_deviation_is_no_kernel_by_either_name():
    for name in ("log_std", "log_scale"):
        ((path, x),) = jax.tree_util.tree_leaves_with_path({name: jnp.ones((1, 2))})
        assert not _is_kernel(path, x)


class Remembering(nnx.Module):
    """Two towers that are computed again for their gradient."""

    def __init__(self, spec, rngs):
        self.policy, self.value = nnx.Linear(3, 2, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, obs):
        weights = (self.policy.kernel[...], self.value.kernel[...])
        return jax.checkpoint(lambda obs, p, v: (obs @ p, (obs @ v)[..., 0]))(obs, *weights)


def test_towers_under_checkpoint_are_told_apart():
    found = named(FlaxNNX(Remembering))
    assert found["['policy']['kernel']"] == "policy" and found["['value']['kernel']"] == "value"


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0), np.zeros(()), jnp.zeros(())])
def test_a_coefficient_of_zero_needs_no_kernels(zero, unchecked):
    check_kernels("PPO", MLP((4,), head=PolicyAndValue()), SPEC, {"shared": zero})
