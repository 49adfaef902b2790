"""A line as a network, one with batch normalisation, and copies of them: what the tests of the copies share."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables

NAN, INF = float("nan"), float("inf")
SPEC = EnvSpec(Box([-1.0] * 2, [1.0] * 2), Discrete(2), "somewhere")
KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
ADAM = optax.adam(0.1)
INPUTS, GOALS = jnp.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [-2.0, 1.0]]), jnp.array([1.0, 0.0, 2.0, -1.0])


@dataclass(frozen=True)
class Line:
    """obs · w + b, and a count of the training calls among the statistics."""

    dtype: str = "float32"
    width: int = 2
    bad_mean: bool = False

    def init(self, key, spec):
        params = {"w": jnp.ones(self.width, self.dtype), "b": jnp.zeros((), self.dtype)}
        return Variables(params, {"mean": jnp.zeros((), self.dtype), "calls": jnp.zeros((), jnp.int32)})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        out = jnp.sum(obs.astype(self.dtype) * variables.params["w"][None], axis=1) + variables.params["b"]
        noise = jnp.zeros((), self.dtype) if key is None or not train else jax.random.uniform(key, dtype=self.dtype)
        stats = variables.stats
        if train:
            stats = {"mean": (NAN if self.bad_mean else 1.0) * jnp.mean(obs).astype(self.dtype), "calls": stats["calls"] + 1}
        return out + noise, carry, stats


def made(target=None, shared=False, *, optimizer=SGD, network=None, **options):
    options = {"target": target, "shared": shared, "optimizer": optimizer} | options
    return NetworkCopies.create(network or Line(), KEY, SPEC, **options)


def moved(copies, w, name="online"):
    held = dataclasses.replace(copies.online, params={"w": jnp.full(2, w, jnp.float32), "b": jnp.zeros(())})
    if name == "online":
        return dataclasses.replace(copies, online=held)
    return dataclasses.replace(copies, shared=dataclasses.replace(copies.shared, variables=held))


def w(variables):
    return float(variables.params["w"][0])


def gradient(value):
    return {"w": jnp.full(2, value), "b": jnp.zeros(())}


def squared(out, goals):
    errors = out.astype(jnp.float32) - goals
    return {"squared": errors**2, "absolute": 0.1 * jnp.abs(errors)}, {"out": out}


def same(a, b):
    return jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b) == jax.tree.map(lambda x: True, b)


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, momentum=0.5, rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, obs):
        return self.out(self.norm(obs))[:, 0]


def normalized(spec, rngs):
    return Normalized(rngs)
