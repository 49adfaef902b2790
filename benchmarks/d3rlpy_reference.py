"""Writes losses and gradients of d3rlpy, for tests/agents/test_offline_d3rlpy.py; its environment has no polyak.

pip install -r benchmarks/requirements-d3rlpy.txt
python benchmarks/d3rlpy_reference.py tests/agents/reference/d3rlpy.npz
"""

import sys

import d3rlpy
import numpy as np
import torch
from d3rlpy.algos import BCConfig, DiscreteCQLConfig, IQLConfig, TD3PlusBCConfig
from d3rlpy.models import VectorEncoderFactory
from d3rlpy.torch_utility import TorchMiniBatch

ROWS, OBS, ACTIONS, GAMMA = 16, 3, 2, 0.97
ENCODER = VectorEncoderFactory(hidden_units=[6], activation="relu")


def make_batch(rng, actions):
    """Every array has a row for each transition; a quarter of them are terminal."""
    arrays = {
        "obs": rng.normal(size=(ROWS, OBS)),
        "action": actions,
        "reward": rng.normal(size=(ROWS, 1)),
        "next_obs": rng.normal(size=(ROWS, OBS)),
        "terminal": rng.random((ROWS, 1)) < 0.25,
    }
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


def to_torch(batch):
    obs, action, reward, next_obs, terminal = (torch.tensor(x) for x in batch.values())
    ones = torch.ones_like(reward)
    return TorchMiniBatch(obs, action, reward, next_obs, action, reward, terminal, ones, "cpu:0")


def linear(module, leaf="data"):
    """Kernel `[in, out]` and bias, or their gradients."""
    values = [module.weight, module.bias] if leaf == "data" else [module.weight.grad, module.bias.grad]
    kernel, bias = (np.zeros(0) if x is None else x.detach().numpy().copy() for x in values)
    return {"kernel": kernel.T, "bias": bias}


def mlp(encoder, heads, leaf="data"):
    """The parameters of one hidden layer and a head."""
    (hidden,) = (layer for layer in encoder.modules() if isinstance(layer, torch.nn.Linear))
    return {"hidden": linear(hidden, leaf), "out": linear(heads, leaf)}


def critics(q_funcs, leaf="data"):
    return {f"critic{i}": mlp(q._encoder, q._fc, leaf) for i, q in enumerate(q_funcs)}


def flatten(tree, prefix):
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree)}
    return {name: x for key, part in tree.items() for name, x in flatten(part, f"{prefix}/{key}").items()}


def shake(modules, seed):
    """Random weights, so that targets differ from online networks and biases from 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in modules:
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)


def create(config, actions):
    algo = config.create(device="cpu:0")
    algo.create_impl((OBS,), actions)
    return algo.impl


def iql(rng):
    batch = make_batch(rng, np.tanh(rng.normal(size=(ROWS, ACTIONS))))
    config = IQLConfig(
        gamma=GAMMA, actor_encoder_factory=ENCODER, critic_encoder_factory=ENCODER, value_encoder_factory=ENCODER
    )
    impl, there = create(config, ACTIONS), to_torch(batch)
    modules = impl.modules
    for seed, module in enumerate((modules.policy, modules.q_funcs, modules.targ_q_funcs, modules.value_func)):
        shake(module.parameters(), seed)
    out = {"batch": batch, "critics": critics(modules.q_funcs), "target": critics(modules.targ_q_funcs)}
    out["value"] = mlp(modules.value_func._encoder, modules.value_func._fc)
    policy = modules.policy
    out["actor"] = mlp(policy._encoder, policy._mu)
    log_std = policy(there.observations).logstd.detach().numpy()
    out["actor"]["log_std"] = np.ravel(log_std)[:ACTIONS]
    loss = impl.compute_critic_loss(there, impl.compute_target(there))
    loss.critic_loss.backward()
    out["loss"] = {"critic": loss.q_loss.item(), "value": loss.v_loss.item()}
    out["gradient"] = {"critics": critics(modules.q_funcs, "grad")}
    out["gradient"]["value"] = mlp(modules.value_func._encoder, modules.value_func._fc, "grad")
    actor = impl.compute_actor_loss(there, policy(there.observations)).actor_loss
    actor.backward()
    out["loss"]["actor"] = actor.item()
    out["gradient"]["actor"] = mlp(policy._encoder, policy._mu, "grad")
    # There the parameter is before a sigmoid onto the range of log σ.
    share = torch.sigmoid(policy._logstd)
    slope = (policy._max_logstd - policy._min_logstd) * share * (1 - share)
    out["gradient"]["actor"]["log_std"] = (policy._logstd.grad / slope).detach().numpy().ravel()
    settings = {"expectile": config.expectile, "inverse_temperature": config.weight_temp, "max_weight": config.max_weight}
    return out | {"settings": settings}


def td3_bc(rng):
    batch = make_batch(rng, np.tanh(rng.normal(size=(ROWS, ACTIONS))))
    config = TD3PlusBCConfig(
        gamma=GAMMA, actor_encoder_factory=ENCODER, critic_encoder_factory=ENCODER, target_smoothing_sigma=0.0, alpha=1.7
    )
    impl, there = create(config, ACTIONS), to_torch(batch)
    modules = impl.modules
    for seed, module in enumerate((modules.policy, modules.targ_policy, modules.q_funcs, modules.targ_q_funcs)):
        shake(module.parameters(), 10 + seed)
    out = {"batch": batch, "critics": critics(modules.q_funcs), "target": critics(modules.targ_q_funcs)}
    out["actor"] = mlp(modules.policy._encoder, modules.policy._fc)
    out["target_actor"] = mlp(modules.targ_policy._encoder, modules.targ_policy._fc)
    critic = impl.compute_critic_loss(there, impl.compute_target(there)).critic_loss
    critic.backward()
    out["gradient"] = {"critics": critics(modules.q_funcs, "grad")}
    actor = impl.compute_actor_loss(there, modules.policy(there.observations)).actor_loss
    actor.backward()
    out["gradient"]["actor"] = mlp(modules.policy._encoder, modules.policy._fc, "grad")
    return out | {"loss": {"critic": critic.item(), "actor": actor.item()}, "settings": {"alpha": config.alpha}}


def discrete_cql(rng):
    batch = make_batch(rng, rng.integers(4, size=(ROWS, 1)))
    config = DiscreteCQLConfig(gamma=GAMMA, encoder_factory=ENCODER, alpha=0.8)
    impl, there = create(config, 4), to_torch(batch)
    modules = impl.modules
    for seed, module in enumerate((modules.q_funcs, modules.targ_q_funcs)):
        shake(module.parameters(), 20 + seed)
    loss = impl.compute_loss(there, impl.compute_target(there)).loss
    loss.backward()
    out = {"batch": batch, "critics": critics(modules.q_funcs), "target": critics(modules.targ_q_funcs)}
    out["gradient"] = {"critics": critics(modules.q_funcs, "grad")}
    return out | {"loss": {"critic": loss.item()}, "settings": {"alpha": config.alpha}}


def bc(rng):
    batch = make_batch(rng, np.tanh(rng.normal(size=(ROWS, ACTIONS))))
    impl, there = create(BCConfig(encoder_factory=ENCODER), ACTIONS), to_torch(batch)
    policy = impl.modules.imitator
    shake(policy.parameters(), 30)
    out = {"batch": batch, "actor": mlp(policy._encoder, policy._fc)}
    loss = impl.compute_loss(there.observations, there.actions).loss
    loss.backward()
    return out | {"loss": {"actor": loss.item()}, "gradient": {"actor": mlp(policy._encoder, policy._fc, "grad")}}


def main(path):
    rng = np.random.default_rng(0)
    cases = {"iql": iql(rng), "td3_bc": td3_bc(rng), "discrete_cql": discrete_cql(rng), "bc": bc(rng)}
    arrays = {name.lstrip("/"): x for name, x in flatten({**cases, "version": d3rlpy.__version__, "gamma": GAMMA}, "").items()}
    np.savez_compressed(path, **arrays)
    print(f"{path}: {len(arrays)} arrays of d3rlpy {d3rlpy.__version__}")


if __name__ == "__main__":
    main(sys.argv[1])
