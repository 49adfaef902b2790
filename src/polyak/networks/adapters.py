"""A user's own network: Flax NNX, Flax Linen and Equinox modules as a `Network` of pure functions."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import PRNGKeyArray

from polyak.core.printing import short_repr
from polyak.core.spaces import EnvSpec, zeros
from polyak.core.types import Network, PyTree, Variables
from polyak.core.warn import warn
from polyak.networks.heads import PolicySettings
from polyak.networks.pair import ActorAndCritic


def check_network(owner: str, network: Any, name: str = "network") -> Network:
    """Check that the setting `name` is a network.

    Raises:
        TypeError: the value is a Flax module, which needs an adapter, or no network at all.
    """
    if isinstance(network, linen.Module | nnx.Module):
        adapter = "FlaxLinen(module)" if isinstance(network, linen.Module) else "FlaxNNX(make), with make(spec, rngs)"
        raise TypeError(f"{owner}: {name} must be polyak.{adapter}, got the module itself, a {type(network).__name__}")
    if isinstance(network, type) or not isinstance(network, Network):
        raise TypeError(f"{owner}: {name} must have init and apply, such as MLP(), got {network!r}")
    return network


def has_batch_statistics(variables: Variables) -> bool:
    """True if a network has statistics, such as the running mean of batch normalization."""
    return any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(variables.stats))


def warn_of_training_layers(owner: str, network: Network, variables: Variables) -> None:
    """Warn of dropout and batch normalization in a network that an agent applies only in evaluation mode."""
    halves = [(network, variables)]
    if isinstance(network, ActorAndCritic):
        halves = [(half, network.variables_of(name, variables)) for name, (half, _) in network.parts.items()]
    layers = []
    for half, arrays in halves:
        if isinstance(half, FlaxNNX | FlaxLinen | Equinox):
            layers += half.training_layers(arrays)
        elif isinstance(half, PolicySettings) and has_batch_statistics(arrays):  # the built-in actor
            layers.append(repr(half))
    if layers:
        warn(
            f"{owner}: the network is always in evaluation mode, where dropout is off and batch normalization has its initial "
            f"statistics: {', '.join(layers)}; use normalize_obs=True or LayerNorm instead"
        )


@short_repr()
@dataclass(frozen=True, repr=False)
class FlaxNNX:
    """A user's Flax NNX module as a `Network`: `make(spec, rngs)` builds it, `module(obs)` takes a batch.

    The module is split once into a graph definition and plain dicts: `nnx.Param`s are trained, everything else
    (batch-norm statistics, counters, dropout keys) is `stats`. Only plain `jax.jit` ever sees them. Two networks are equal, and
    compile once, when `make` is the same function or equal.
    """

    make: Callable[[EnvSpec, nnx.Rngs], nnx.Module]

    def __post_init__(self) -> None:
        if isinstance(self.make, nnx.Module) or not callable(self.make):
            raise TypeError(
                f"FlaxNNX: make must be a function or class of (spec, rngs) that builds a module, got {_describe(self.make)}"
            )

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Fresh variables for the spec's spaces."""
        module: Any = self.make(spec, nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise TypeError(f"FlaxNNX: make(spec, rngs) must return an NNX module, got {_describe(module)}")
        graph, params, stats = _split(module)
        return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(stats), graph)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(out, carry, stats)` for obs leaves `[B, ...]`; with `train`, dropout is on and statistics advance."""
        module = merge(variables)
        (module.train if train else module.eval)()
        if key is None:
            out = module(obs)
        else:
            # Random numbers come only from the key; the module's own streams do not advance.
            streams = nnx.clone(nnx.state(module, nnx.RngState))
            tags = sorted({node.tag for _, node in nnx.iter_graph(module) if isinstance(node, nnx.RngStream)})
            keys: Any = {tag: jax.random.fold_in(key, number) for number, tag in enumerate(tags)}
            nnx.reseed(module, **keys)
            out = module(obs)
            nnx.update(module, streams)
        return out, carry, nnx.to_pure_dict(_split(module)[2])

    def training_layers(self, variables: Variables) -> list[str]:
        """The layers that compute something else in training mode: dropout and batch normalization, by path."""
        found = []
        for path, node in nnx.iter_graph(merge(variables)):
            if isinstance(node, nnx.BatchNorm) or (isinstance(node, nnx.Dropout) and node.rate > 0):
                found.append(f"{type(node).__name__} {'.'.join(map(str, path))}".rstrip())
        return sorted(found)


@short_repr()
@dataclass(frozen=True, repr=False)
class FlaxLinen:
    """A user's Flax Linen module as a `Network`: `module.apply(variables, obs)` takes a batch.

    The collection `params` is trained, all other collections are `stats`.

    Attributes:
        module: a Linen module (hashable, as Linen modules are).
        train_argument: the name of the module's argument that switches training phase, where it has one.
    """

    module: Any
    train_argument: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.module, linen.Module):
            raise TypeError(f"FlaxLinen: module must be a Linen module, such as Net(), got {_describe(self.module)}")

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Fresh variables for the spec's spaces."""
        example = jax.tree.map(jnp.asarray, zeros(spec.obs, (1,)))
        collections = dict(self.module.init({"params": key, "dropout": key}, example, **self._phase(train=False)))
        return Variables(collections.pop("params", {}), collections)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(out, carry, stats)` for obs leaves `[B, ...]`."""
        collections = {"params": variables.params, **variables.stats}
        rngs = None if key is None else {"dropout": key}
        out, changed = self.module.apply(
            collections, obs, rngs=rngs, mutable=list(variables.stats) if train else [], **self._phase(train=train)
        )
        return out, carry, {**variables.stats, **changed}

    def training_layers(self, variables: Variables) -> list[str]:
        """The layers that differ in training mode: layers with batch statistics, or one text for all others."""
        if "batch_stats" in variables.stats:
            return [f"BatchNorm {name}" for name in variables.stats["batch_stats"]]
        return [] if self.train_argument is None else [f"layers that {self.train_argument!r} switches"]

    def _phase(self, *, train: bool) -> dict[str, bool]:
        return {} if self.train_argument is None else {self.train_argument: train}


@short_repr()
@dataclass(frozen=True, repr=False)
class Equinox:
    """A user's Equinox module as a `Network`: `make(spec, key)` builds it, `module(obs)` takes *one* observation.

    Its floating-point arrays are trained, its other arrays are `stats`; the rest is static. It is mapped over the batch. Where
    its `__call__` takes `key`, each observation has a key of its own, for dropout.
    """

    make: Callable[[EnvSpec, PRNGKeyArray], Any]

    def __post_init__(self) -> None:
        # An Equinox module that has been built is callable too, and is a tree of its arrays.
        if not callable(self.make) or jax.tree.leaves(self.make) != [self.make]:
            raise TypeError(
                f"Equinox: make must be a function or class of (spec, key) that builds a module, got {_describe(self.make)}"
            )

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Fresh variables for the spec's spaces."""
        import equinox as eqx

        arrays, fixed = eqx.partition(self.make(spec, key), eqx.is_array)
        paths, structure = jax.tree_util.tree_flatten_with_path(arrays)
        named = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
        params = {name: leaf for name, leaf in named.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
        stats = {name: leaf for name, leaf in named.items() if name not in params}
        return Variables(
            params, stats, graph=(tuple(named), structure, tuple(jax.tree.leaves(fixed)), jax.tree.structure(fixed))
        )

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`(out, carry, stats)` for obs leaves `[B, ...]`."""
        import equinox as eqx

        names, structure, fixed, fixed_structure = variables.graph
        named = {**variables.params, **variables.stats}
        arrays = jax.tree.unflatten(structure, [named[name] for name in names])
        module = eqx.combine(arrays, jax.tree.unflatten(fixed_structure, fixed))
        module = eqx.nn.inference_mode(module, not train)
        if key is None or "key" not in inspect.signature(type(module).__call__).parameters:
            return jax.vmap(module)(obs), carry, variables.stats
        keys = jax.random.split(key, len(jax.tree.leaves(obs)[0]))
        return jax.vmap(lambda one, key: module(one, key=key))(obs, keys), carry, variables.stats

    def training_layers(self, variables: Variables) -> list[str]:
        """The layers that compute something else in training mode: dropout."""
        import equinox as eqx

        _, _, fixed, fixed_structure = variables.graph
        module = jax.tree.unflatten(fixed_structure, fixed)
        nodes = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, eqx.nn.Dropout))
        return ["Dropout" for node in nodes if isinstance(node, eqx.nn.Dropout)]


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """Graph definition, trained parameters, everything else."""
    parts: Any = nnx.split(module, nnx.Param, ...)
    return parts[0], parts[1], parts[2]


def merge(variables: Variables) -> Any:
    """The module of a Flax NNX network's variables."""
    return nnx.merge(variables.graph, variables.params, variables.stats)
