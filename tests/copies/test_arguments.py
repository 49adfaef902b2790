"""Copies that are created or called with something else say what was wanted, before anything changes."""

import jax.numpy as jnp
import optax
import pytest

from polyak.copies.follow import Follow
from tests.copies.line import ADAM, GOALS, INPUTS, Line, made

WRONG = {
    "target": ([True, 0.005, "soft"], TypeError, r"target must be a Follow, such as Follow\(tau=0.005\), or None, got"),
    "online": ([1.0], TypeError, "online must be a Follow"),
    "optimizer": (["adam", 1e-3, optax.adam], TypeError, r"optimizer must be an optax\.GradientTransformation or None, got"),
    "network": ([Line, lambda obs: obs], TypeError, r"network must be a Network, such as FlaxNNX\(make\), got"),
    "shared": ([Follow(), 1, None], TypeError, r"shared must be True or False, got .*; pass its rule as online=Follow\("),
    "name": ([3, None], TypeError, "name must be a string, got"),
}


@pytest.mark.parametrize("argument", WRONG)
def test_create_says_what_it_wants(argument, unchecked):
    values, error, says = WRONG[argument]
    for value in values:
        with pytest.raises(error, match=says):
            made(**{argument: value})


def test_optimizers_of_optax_are_taken():
    for optimizer in (None, ADAM, optax.chain(optax.clip(1.0), ADAM), optax.MultiSteps(ADAM, 2)):
        assert made(optimizer=optimizer).optimizer is optimizer


@pytest.mark.parametrize(
    "requests", ["online", ("online", INPUTS), ["online"], {"online": INPUTS}, None, [("online", INPUTS, 1)]]
)
def test_requests_that_are_no_pairs_are_rejected(requests, unchecked):
    with pytest.raises(TypeError, match=r"requests must be pairs \(copy, inputs\), such as \[\('online', obs\)\], got .*"):
        made().predict(requests)


LOSSES = {
    "a scalar": (lambda out, goals: jnp.mean(out - goals), TypeError, r"got an array \[\]\n"),
    "a scalar and others": (lambda out, goals: (jnp.mean(out - goals), {}), TypeError, r"got \(an array \[\], dict\)\n"),
    "parts alone": (lambda out, goals: {"error": out - goals}, TypeError, "got dict\n"),
    "no part": (lambda out, goals: ({}, {}), ValueError, "got no part\n"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_returns_something_else_is_rejected(name, unchecked):
    loss, error, says = LOSSES[name]
    copies = made()
    with pytest.raises(error, match=rf"loss_fn must return \(parts, others\): .*, {says}"):
        copies.train_and_sync(loss, INPUTS, GOALS)
    with pytest.raises(error, match=r"loss_fn must return \(parts, others\)"):
        copies.compute_gradients(loss, INPUTS, GOALS)
