"""Writes losses and gradients of the authors' FQL, for tests/agents/test_fql.py; its environment has no polyak.

git clone https://github.com/seohongpark/fql && git -C fql checkout 719d0441
pip install -r benchmarks/requirements-fql.txt
PYTHONPATH=fql python benchmarks/fql_reference.py tests/agents/reference/fql.npz
"""

import sys
from unittest import mock

import jax
import numpy as np
from agents.fql import FQLAgent, get_config

ROWS, OBS, ACTIONS, HIDDEN, GAMMA = 16, 3, 2, (6,), 0.97
CASES = {
    "default": {"alpha": 10.0},
    "min": {"alpha": 3.0, "q_agg": "min", "normalize_q_loss": True, "flow_steps": 4},
}


def make_batch(rng):
    """A quarter of the transitions are terminal; some actions of the next states are beyond the bounds before clipping."""
    arrays = {
        "observations": rng.normal(size=(ROWS, OBS)),
        "actions": np.tanh(rng.normal(size=(ROWS, ACTIONS))),
        "rewards": rng.normal(size=ROWS),
        "next_observations": rng.normal(size=(ROWS, OBS)),
        "masks": rng.random(ROWS) >= 0.25,
    }
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


def flatten(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def case(rng, settings):
    """The batch, noise, weights, losses and gradients of one setting; all numbers that the code draws are the given ones."""
    config = get_config()
    config.update(settings | {"actor_hidden_dims": HIDDEN, "value_hidden_dims": HIDDEN, "layer_norm": False, "discount": GAMMA})
    batch = make_batch(rng)
    agent = FQLAgent.create(0, batch["observations"], batch["actions"], config)
    # Random weights, so that targets differ from online networks and biases from 0.
    params = jax.tree.map(lambda x: 0.7 * rng.normal(size=x.shape).astype(np.float32), agent.network.params)
    agent = agent.replace(network=agent.network.replace(params=params))
    noise = {name: rng.normal(size=(ROWS, ACTIONS)).astype(np.float32) for name in ("next", "start", "distill")}
    time = rng.random((ROWS, 1)).astype(np.float32)
    key = jax.random.PRNGKey(0)

    def losses(params):
        with mock.patch("jax.random.normal", side_effect=[noise["next"]]):
            critic, _ = agent.critic_loss(batch, params, key)
        # The last draw is for a metric.
        draws = [noise["start"], noise["distill"], noise["distill"]]
        with mock.patch("jax.random.normal", side_effect=draws), mock.patch("jax.random.uniform", return_value=time):
            actor, info = agent.actor_loss(batch, params, key)
        parts = {"critic": critic, "flow": info["bc_flow_loss"], "actor": actor - info["bc_flow_loss"]}
        return critic + actor, parts | {"distill": info["distill_loss"]}

    with jax.disable_jit():
        (_, parts), gradient = jax.value_and_grad(losses, has_aux=True)(params)
    return {"batch": batch, "noise": noise, "time": time, "params": params, "loss": parts, "gradient": gradient}


def main(path):
    rng = np.random.default_rng(0)
    cases = {name: case(rng, settings) for name, settings in CASES.items()}
    arrays = {name: np.asarray(x) for name, x in flatten(cases | {"gamma": GAMMA}).items()}
    np.savez_compressed(path, **arrays)
    print(f"{path}: {len(arrays)} arrays")


if __name__ == "__main__":
    main(sys.argv[1])
