"""The categorical projection and the quantile loss, against closed numbers and slow loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.ops.value_distributions import entropy, midpoints, project_categorical, quantile_huber_loss

NEAR = {"rtol": 1e-5, "atol": 1e-6}


def slow_projection(probs, values, atoms):
    """Algorithm 1 of the C51 paper, with the case in which a value falls on an atom."""
    step = atoms[1] - atoms[0]
    projected = np.zeros((len(probs), len(atoms)))
    for row in range(len(probs)):
        for p, value in zip(probs[row], values[row], strict=True):
            b = (min(max(value, atoms[0]), atoms[-1]) - atoms[0]) / step
            low = min(int(np.floor(b)), len(atoms) - 2)
            projected[row, low] += p * (low + 1 - b)
            projected[row, low + 1] += p * (b - low)
    return projected


def slow_quantile_loss(quantiles, tau, targets, delta):
    loss = np.zeros(len(quantiles))
    for row in range(len(quantiles)):
        for theta, fraction in zip(quantiles[row], tau[row], strict=True):
            for target in targets[row]:
                u = target - theta
                huber = u * u / 2 / delta if abs(u) < delta else abs(u) - delta / 2
                loss[row] += abs(fraction - (u < 0)) * huber / targets.shape[1]
    return loss


def test_projection_of_closed_numbers():
    atoms, uniform = jnp.linspace(-1.0, 1.0, 5), jnp.full((1, 5), 0.2)
    np.testing.assert_allclose(
        project_categorical(uniform, 0.25 + 0.5 * atoms[None], atoms)[0], [0, 0.1, 0.4, 0.4, 0.1], **NEAR
    )
    # A terminal reward on an atom: defect 9 of other libraries loses its probability.
    terminal = jnp.full((1, 5), 0.5)
    np.testing.assert_allclose(project_categorical(uniform, terminal, atoms)[0], [0, 0, 0, 1, 0], **NEAR)


@pytest.mark.parametrize("seed", range(5))
def test_projection_against_a_slow_loop(seed):
    random = np.random.default_rng(seed)
    probs = random.dirichlet(np.ones(7), size=20).astype(np.float32)
    atoms = np.linspace(-3.0, 2.0, 7, dtype=np.float32)
    values = random.normal(scale=4.0, size=(20, 7)).astype(np.float32)
    values[:5] = random.choice(atoms, size=(5, 7))
    got = project_categorical(*map(jnp.asarray, (probs, values, atoms)))
    np.testing.assert_allclose(got, slow_projection(probs, values, atoms), **NEAR)


@pytest.mark.parametrize("reward", [-50.0, -10.0, -0.4, 0.0, 3.2, 10.0, 50.0])
def test_projection_keeps_the_sum_of_probabilities(reward):
    """Also where values fall on atoms, or are clipped to the first or last one: Coach loses it there (defect 9)."""
    atoms = jnp.linspace(-10.0, 10.0, 51)
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(0), (4, 51)))
    for discount in (0.0, 0.5, 1.0):
        projected = project_categorical(probs, reward + discount * jnp.broadcast_to(atoms[None], probs.shape), atoms)
        np.testing.assert_allclose(projected.sum(axis=1), 1.0, rtol=1e-5)
        assert float(projected.min()) >= 0


def test_projection_keeps_the_mean_of_values_inside_the_atoms():
    atoms = jnp.linspace(-10.0, 10.0, 51)
    values = jax.random.uniform(jax.random.key(1), (8, 51), minval=-9.0, maxval=9.0)
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(2), (8, 51)))
    projected = project_categorical(probs, values, atoms)
    np.testing.assert_allclose(projected @ atoms, jnp.sum(probs * values, axis=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("delta", "loss"), [(1.0, 0.59375), (0.0, 0.875)])
def test_quantile_loss_of_closed_numbers(delta, loss):
    quantiles, targets = jnp.array([[-1.0, 0.0, 2.0]]), jnp.array([[0.0, 1.5]])
    np.testing.assert_allclose(quantile_huber_loss(quantiles, midpoints(3)[None], targets, delta), [loss], rtol=1e-6)


@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0, 5.0])
def test_quantile_loss_against_a_slow_loop(delta):
    random = np.random.default_rng(0)
    quantiles, targets = random.normal(size=(6, 5)).astype(np.float32), random.normal(size=(6, 4)).astype(np.float32)
    tau = random.uniform(size=(6, 5)).astype(np.float32)
    expected = slow_quantile_loss(quantiles, tau, targets, delta)
    np.testing.assert_allclose(quantile_huber_loss(*map(jnp.asarray, (quantiles, tau, targets)), delta), expected, **NEAR)


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_quantile_loss_has_finite_gradients_where_errors_are_zero(delta):
    quantiles = jnp.array([[0.0, 1.0, 1e30]])
    gradient = jax.grad(lambda q: quantile_huber_loss(q, midpoints(3)[None], jnp.array([[0.0, 1.0]]), delta).sum())(quantiles)
    assert bool(jnp.isfinite(gradient).all())


def test_the_best_quantiles_are_those_of_the_targets_in_any_order():
    """Defect 10: Coach reorders fractions by argsort, where ranks are meant; here the order of targets does not matter."""
    targets = jnp.array([[3.0, -1.0, 0.5, 9.0, 2.0]])
    quantiles, tau = jnp.zeros((1, 5)), midpoints(5)[None]

    def descend(quantiles, _):
        return quantiles - 0.05 * jax.grad(lambda q: quantile_huber_loss(q, tau, targets, 0.0).sum())(quantiles), None

    quantiles, _ = jax.lax.scan(descend, quantiles, None, length=3_000)
    np.testing.assert_allclose(quantiles[0], np.sort(targets[0]), atol=0.1)
    shuffled = targets[:, jnp.array([4, 0, 2, 1, 3])]
    losses = [quantile_huber_loss(quantiles, tau, x, 1.0) for x in (targets, shuffled)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_entropy():
    np.testing.assert_allclose(entropy(jnp.array([[0.25] * 4, [1.0, 0, 0, 0]])), [np.log(4.0), 0.0], atol=1e-6)
