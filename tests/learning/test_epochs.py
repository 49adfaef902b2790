"""Epochs of gradient steps on a loss so simple that every step can be worked out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.learning.batch import Rows
from polyak.learning.epochs import Objective, Taken, gradient_epochs
from polyak.learning.minibatches import epoch_words, shuffled_minibatches
from polyak.ops.optimizer import Adam

KEY = jax.random.key(2)
NUM_STEPS, NUM_ENVS = 4, 2
# An ε beside which the root of the second moment is nothing: Adam without momentum is a step of a tenth of the gradient.
SGD = {"b1": 0.0, "eps": 1e8}
RATE = 1e7


@dataclasses.dataclass(frozen=True)
class Distance:
    """The weighted mean of (p - advantage)² / 2, whose least value is at the mean advantage."""

    advantage: np.ndarray
    weight: np.ndarray
    stop_above: float = np.inf
    microbatch_size: int | None = None

    def rows(self, params):
        zeros = jnp.zeros(self.weight.shape)
        # What an epoch learns from may follow its first parameters.
        moved = jnp.asarray(self.advantage) + 0.0 * params[0]
        return Rows(zeros[:, None], zeros, None, zeros, zeros, zeros, moved, zeros, jnp.asarray(self.weight), None, ())

    def known(self, params, rows, index, total):
        return {"total": total, "rows": index.shape[0]}

    def share(self, params, part, total, known):
        error = jnp.where(part.weight > 0, params[0] - part.advantage, 0.0)
        loss = jnp.sum(0.5 * part.weight * jnp.square(error)) / jnp.maximum(total, 1e-9)
        return loss, {"loss": loss}

    def whole(self, params, gradient, terms, known):
        return gradient, terms | {"of": known["total"]}

    def stops(self, terms):
        return terms["loss"] > self.stop_above


ADVANTAGE = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], np.float32)
ONES = np.ones(8, np.float32)


def run(objective, *, start=0.0, epochs=2, num_minibatches=2, usable=True, max_grad_norm=None, normalize=None):
    adam = Adam(max_grad_norm=max_grad_norm, **SGD)
    params = jnp.array([start], jnp.float32)
    return gradient_epochs(
        objective,
        params,
        adam.init(params),
        KEY,
        num_epochs=epochs,
        adam=adam,
        learning_rate=RATE,
        usable=jnp.array(usable),
        shape=(NUM_STEPS, NUM_ENVS),
        num_minibatches=num_minibatches,
        normalize_advantage=normalize,
        axis_name=None,
    )


def minibatches(num_minibatches, epochs):
    sizes = NUM_STEPS, NUM_ENVS, num_minibatches
    return [np.asarray(shuffled_minibatches(words, *sizes)) for words in epoch_words(KEY, epochs, *sizes)]


def term(taken, name):
    return taken.values[..., taken.names.index(name)]


def by_hand(advantage=ADVANTAGE, weight=ONES, epochs=2, p=0.0):
    """p ← p - 0.1 (p - mean) for every minibatch; where a minibatch is not finite or weighs nothing, nothing."""
    kept = []
    for epoch in minibatches(2, epochs):
        for index in epoch:
            w, a = weight[index], advantage[index]
            gradient = np.sum(w[w > 0] * (p - a[w > 0])) / w.sum() if w.sum() else np.nan
            kept.append(bool(np.isfinite(gradient)))
            p = p - 0.1 * gradient if kept[-1] else p
    return p, kept


def test_every_minibatch_of_every_epoch_is_one_step():
    objective = Distance(ADVANTAGE, ONES)
    assert isinstance(objective, Objective)
    params, optimizer, taken = run(objective)
    wanted, _ = by_hand()
    assert float(params[0]) == pytest.approx(wanted, rel=1e-5) and optimizer.count == 4
    assert taken.kept.shape == (2, 2) and taken.kept.all() and not taken.refused.any() and not taken.bad.any()
    np.testing.assert_array_equal(term(taken, "of"), np.full((2, 2), 4.0))


def test_U14_a_minibatch_that_is_not_finite_is_refused_and_the_others_are_taken():
    advantage = ADVANTAGE.copy()
    advantage[3] = np.nan
    params, optimizer, taken = run(Distance(advantage, ONES))
    wanted, kept = by_hand(advantage)
    assert float(params[0]) == pytest.approx(wanted, rel=1e-5) and optimizer.count == 2 == sum(kept)
    np.testing.assert_array_equal(taken.kept.reshape(-1), kept)
    np.testing.assert_array_equal(taken.refused, ~taken.kept)
    assert taken.bad[~taken.kept].all()


def test_A1_a_minibatch_without_weight_is_no_step():
    ((first, second),) = minibatches(2, epochs=1)
    weight = ONES.copy()
    weight[first] = 0.0
    params, optimizer, taken = run(Distance(ADVANTAGE, weight), epochs=1)
    assert float(params[0]) == pytest.approx(0.1 * ADVANTAGE[second].mean(), rel=1e-5) and optimizer.count == 1
    np.testing.assert_array_equal(taken.kept, [[False, True]])
    assert not taken.bad.any() and not taken.refused.any(), "nothing was wrong with it"
    _, _, taken = run(Distance(ADVANTAGE, weight), epochs=1, usable=False)
    np.testing.assert_array_equal(taken.refused, [[False, True]])


def test_A8_of_data_that_is_not_usable_no_step_is_taken():
    params, optimizer, taken = run(Distance(ADVANTAGE, ONES), usable=False, start=3.0)
    assert params[0] == 3.0 and optimizer.count == 0 and taken.refused.all() and not taken.kept.any()


def test_after_a_stop_no_step_is_taken_and_none_is_refused():
    # Half the squared distance from 0 is above 5 in one minibatch and falls with every step.
    loss = float(0.5 * np.mean(ADVANTAGE**2))
    params, optimizer, taken = run(Distance(ADVANTAGE, ONES, stop_above=loss - 0.1), num_minibatches=1)
    assert params[0] == 0 and optimizer.count == 0
    assert not taken.kept.any() and not taken.refused.any()
    params, optimizer, _ = run(Distance(ADVANTAGE, ONES, stop_above=loss + 0.1), num_minibatches=1)
    assert params[0] > 0 and optimizer.count == 2


def test_the_norm_is_told_before_and_after_clipping():
    _, _, taken = run(Distance(ADVANTAGE, ONES), epochs=1, num_minibatches=1, max_grad_norm=2.0)
    assert float(term(taken, "grad_norm")[0, 0]) == pytest.approx(4.5)
    assert float(term(taken, "grad_norm_clipped")[0, 0]) == 2.0
    _, _, taken = run(Distance(ADVANTAGE, ONES), epochs=1, num_minibatches=1, max_grad_norm=9.0)
    assert float(term(taken, "grad_norm_clipped")[0, 0]) == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("kept", "of_all", "of_last"),
    [
        ([[1, 1], [1, 1], [1, 1]], [2.5, 25.0], [4.5, 45.0]),
        ([[1, 0], [1, 1], [0, 0]], [5 / 3, 50 / 3], [2.5, 25.0]),
        ([[0, 1], [0, 0], [0, 0]], [1.0, 10.0], [1.0, 10.0]),
        ([[0, 0], [0, 0], [0, 0]], [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_terms_are_averaged_over_the_steps_that_were_taken(kept, of_all, of_last):
    kept = np.array(kept, bool)
    values = np.arange(6, dtype=np.float32).reshape(3, 2, 1) * np.array([1.0, 10.0], np.float32)
    values[~kept] = np.nan
    fine = np.zeros((3, 2, 2), np.float32)
    taken = Taken(jnp.asarray(np.concatenate([values, fine, kept[..., None], ~kept[..., None]], -1)), ("a", "b"))
    means = taken.means()
    assert [list(terms) for terms in means] == [["a", "b"]] * 2
    for terms, wanted in zip(means, (of_all, of_last), strict=True):
        np.testing.assert_allclose(list(terms.values()), wanted, rtol=1e-6)


def test_advantages_are_normalised_before_they_are_learned_from():
    # Of mean 0: there is nothing to move to.
    params, _, taken = run(Distance(ADVANTAGE, ONES), normalize="minibatch")
    assert float(jnp.abs(params[0])) < 1e-6
    np.testing.assert_allclose(term(taken, "loss"), 0.5, rtol=1e-5)
    params, _, _ = run(Distance(ADVANTAGE, ONES), normalize="batch", epochs=1)
    assert float(jnp.abs(params[0])) > 1e-6


def test_an_epoch_learns_from_what_its_first_parameters_say():
    @dataclasses.dataclass(frozen=True)
    class Ahead(Distance):
        """The goal is always one ahead of where the epoch began."""

        def rows(self, params):
            return dataclasses.replace(super().rows(params), advantage=jnp.full(8, 1.0) + params[0])

    params, _, _ = run(Ahead(ADVANTAGE, ONES), epochs=3, num_minibatches=1)
    assert float(params[0]) == pytest.approx(0.3, rel=1e-5)
