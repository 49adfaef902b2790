"""The arguments with which copies are created and trained."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.copies.follow import Follow
from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import QValues
from polyak.ops.gradient_step import Aux
from tests.copies.line import ADAM, GOALS, INPUTS, KEY, SGD, SPEC, made, squared


@pytest.mark.parametrize("shared", [Follow(), 1, None])
def test_shared_is_a_switch(shared, unchecked):
    with pytest.raises(ValueError, match="shared must be one of True, False, got"):
        made(shared=shared)


@pytest.mark.parametrize("rule", [0.005, "soft", True, Follow])
def test_a_copy_follows_by_a_rule(rule, unchecked):
    for rules in ({"target": rule}, {"shared": True, "online": rule}):
        with pytest.raises(TypeError, match=r"^network: a copy follows by a rule, such as Follow\(tau=0.005\), got "):
            made(**rules)


def test_optimizers_of_optax_are_taken():
    for optimizer in (None, ADAM, optax.chain(optax.clip(1.0), ADAM), optax.MultiSteps(ADAM, 2)):
        assert made(optimizer=optimizer).optimizer is optimizer


def test_requests_may_be_an_iterator():
    assert len(made(target=Follow()).predict(zip(("online", "target"), (INPUTS, INPUTS), strict=True))) == 2


@pytest.mark.parametrize(
    "requests", ["online", ("online", INPUTS), ["online"], {"online": INPUTS}, None, [("online", INPUTS, 1)]]
)
def test_requests_that_are_no_pairs_are_rejected(requests, unchecked):
    with pytest.raises(TypeError, match=r"^network: predict: requests must be \(copy, inputs\) pairs, got "):
        made().predict(requests)


DICT_SPEC = EnvSpec(Dict({"x": Box([-1.0], [1.0]), "y": Box([-1.0], [1.0])}), Discrete(2))
OUT_OF_TREE = {
    "a dict for an array": (SPEC, {"x": INPUTS}, r"\{'x': float32\[4,2\]\}"),
    "a tuple for an array": (SPEC, (INPUTS, INPUTS), r"\(float32\[4,2\], float32\[4,2\]\)"),
    "a dict without an entry": (DICT_SPEC, {"x": INPUTS[:, :1]}, r"\{'x': float32\[4,1\]\}"),
    "a tuple for a dict": (DICT_SPEC, (INPUTS[:, :1], INPUTS[:, :1]), r"\(float32\[4,1\], float32\[4,1\]\)"),
}


@pytest.mark.parametrize("name", OUT_OF_TREE)
def test_inputs_in_another_tree_are_rejected(name, unchecked):
    spec, inputs, got = OUT_OF_TREE[name]
    copies = NetworkCopies.create(MLP((4,), head=QValues()), KEY, spec, target=Follow(), optimizer=ADAM)
    wanted = rf"inputs of 'target' must have the tree and the shapes of the observations .*, got {got} \(.*Error: ."
    with pytest.raises(ValueError, match=wanted):
        copies.predict([("target", inputs)])
    with pytest.raises(ValueError, match=wanted.replace("target", "online")):
        copies.train_and_sync(squared, inputs, GOALS)


@pytest.mark.parametrize(
    ("spec", "message"), [(SPEC, "^dot_general requires contracting dimensions"), (DICT_SPEC, "string indexing; got idx='x'")]
)
def test_an_array_that_the_network_cannot_take_keeps_the_error_of_jax(spec, message, unchecked):
    copies = NetworkCopies.create(MLP((4,), head=QValues()), KEY, spec, optimizer=ADAM)
    with pytest.raises(TypeError, match=message):
        copies.predict([("online", jnp.ones((4, 3)))])


def test_images_of_other_channels_keep_the_error_of_jax(unchecked):
    images = EnvSpec(Box(0, 255, (84, 84, 4), np.uint8), SPEC.action)
    copies = NetworkCopies.create(NatureCNN(head=QValues()), KEY, images, optimizer=ADAM)
    with pytest.raises(ValueError, match=r"conv_general_dilated"):
        copies.predict([("online", jnp.zeros((4, 84, 84, 3), jnp.uint8))])


NO_AUX = {
    "a loss alone": lambda params, batch: jnp.sum(params["w"]),
    "a dict of metrics": lambda params, batch: (jnp.sum(params["w"]), {"norm": params["b"]}),
    "nothing beside the loss": lambda params, batch: (jnp.sum(params["w"]), None),
    "three results": lambda params, batch: (jnp.sum(params["w"]), Aux({}), ()),
}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", NO_AUX)
def test_a_loss_of_the_parameters_that_returns_no_aux_is_rejected(name, num_microbatches, unchecked):
    example = r"aux a polyak.ops.gradient_step.Aux such as Aux\(\{'error': error\}\)"
    wanted = rf"^loss_fn must return \(loss, aux\), {example}, got ."
    with pytest.raises(TypeError, match=wanted):
        made().train(NO_AUX[name], SGD, INPUTS, num_microbatches=num_microbatches)


LOSSES = {
    "a scalar": lambda out, goals: jnp.mean(out - goals),
    "a scalar and others": lambda out, goals: (jnp.mean(out - goals), {}),
    "parts alone": lambda out, goals: {"error": out - goals},
    "no part": lambda out, goals: ({}, {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_returns_something_else_is_rejected(name, unchecked):
    copies = made()
    for method in (copies.train_and_sync, copies.compute_gradients):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            method(LOSSES[name], INPUTS, GOALS)
