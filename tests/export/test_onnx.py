"""A function as an ONNX model: every operation against JAX, and those without a translation by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

from polyak.export.archive import ExportError  # noqa: E402
from polyak.export.onnx import model  # noqa: E402

ROW = {
    "x": jax.ShapeDtypeStruct((3, 4), np.float32),
    "image": jax.ShapeDtypeStruct((6, 7, 2), np.float32),
    "n": jax.ShapeDtypeStruct((4,), np.int32),
}
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 2, 4)), jnp.float32)
MATRIX = jnp.asarray(np.random.default_rng(2).normal(size=(3, 4, 5)), jnp.float32)


def operations(x, image, n):
    """Each translation at least once, in three outputs for each dtype."""
    positive = jnp.abs(x) + 0.1
    convolved = jax.lax.conv_general_dilated(
        image, KERNEL, (2, 1), [(1, 0), (0, 2)], rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    parts = jnp.split(x, 2, axis=-1)
    floats = [
        *(jnp.tanh(x), jnp.exp(x), jnp.log(positive), jnp.sqrt(positive), jax.lax.rsqrt(positive), -x, jnp.abs(x), jnp.sign(x)),
        *(jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.sin(x), jnp.cos(x), jax.lax.erf(x), jnp.expm1(x), jnp.log1p(positive)),
        *(x**3, jnp.square(x), positive**x, x / positive, jnp.clip(x, -0.5, 0.5), jax.lax.clamp(-0.2, x, 0.2)),
        *(jax.nn.softmax(x), jax.nn.elu(x), jax.nn.gelu(x), jax.nn.silu(x), jax.nn.sigmoid(x), jnp.where(x > 0.5, x, -x)),
        *(jnp.stack(parts, axis=2).reshape(-1, 3, 4), jnp.concatenate(parts[::-1], -1), x[:, ::2].repeat(1, 0)),
        *(jnp.einsum("bij,jk->bik", x, MATRIX[0]), jnp.einsum("bij,ijk->bik", x, MATRIX), jnp.max(x, -1), jnp.min(x, (1, 2))),
        x + jax.lax.fori_loop(0, 3, lambda _, y: y * 2, jnp.ones((1, 1, 4))),  # known beforehand
        *(x.sum(1), jnp.swapaxes(x, 1, 2), jnp.broadcast_to(x[:, :1], x.shape), x.squeeze(), convolved.reshape(len(image), -1)),
    ]
    bools = [(n > 1) & (n <= 3), (n < 1) | (n >= 3), ~(n == 2), n != 2, (n > 1) ^ (n > 2)]
    whole = [
        jnp.rint(jnp.clip(40 * x, 0, 200)).astype(jnp.uint8).astype(jnp.int32),
        n + 2,
        jnp.argmax(x, -1).astype(jnp.int32),
        (n[:, :, None] == jnp.arange(3)[None, None]).astype(jnp.int32),
    ]
    return tuple([*floats, *bools, *whole])


def test_every_operation_answers_as_jax_does():
    def safe(x, image, n):
        return jax.vmap(lambda x, image, n: tuple(y[0] for y in operations(x[None], image[None], n[None])))(x, image, n)

    rng = np.random.default_rng(0)
    feed = {
        "x": rng.normal(size=(5, 3, 4)).astype(np.float32),
        "image": rng.normal(size=(5, 6, 7, 2)).astype(np.float32),
        "n": rng.integers(0, 5, (5, 4)).astype(np.int32),
    }
    wanted = jax.jit(safe)(*feed.values())
    outputs = {f"out{i}": jax.ShapeDtypeStruct(y.shape[1:], y.dtype) for i, y in enumerate(wanted)}
    session = runtime.InferenceSession(model(safe, ROW, outputs, {"by": "polyak"}), providers=["CPUExecutionProvider"])
    for name, got, y in zip(outputs, session.run(None, feed), wanted, strict=True):
        assert (got.dtype, got.shape) == (y.dtype, y.shape), name
        np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-5, err_msg=name)


def test_what_depends_on_the_number_of_rows_alone_is_made_when_it_is_known():
    def ranks(x):
        return jnp.broadcast_to(jnp.arange(4.0)[None], x.shape), jnp.concatenate([x, jnp.ones((x.shape[0], 2))], 1)

    row = {"x": jax.ShapeDtypeStruct((4,), np.float32)}
    outputs = {"a": row["x"], "b": jax.ShapeDtypeStruct((6,), np.float32)}
    session = runtime.InferenceSession(model(ranks, row, outputs, {}), providers=["CPUExecutionProvider"])
    for rows in (1, 3):
        x = np.ones((rows, 4), np.float32)
        a, b = session.run(None, {"x": x})
        np.testing.assert_array_equal(a, np.tile(np.arange(4), (rows, 1)))
        np.testing.assert_array_equal(b, np.ones((rows, 6)))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: (jnp.sort(x),), "no translation of the operation 'sort'"),
        (lambda x: (jnp.cumsum(x, -1),), "no translation of the operation 'cumsum'"),
        (lambda x: (jax.lax.round(x),), "rounds halves to the even number"),
        (lambda x: (jax.pure_callback(lambda x: x, x, x, vmap_method="sequential"),), "operation 'pure_callback'"),
        (lambda x: (jax.lax.fori_loop(0, 5, lambda _, y: y * 2, x),), "operation 'scan'"),
        (lambda x: jax.lax.scan(lambda c, r: (c + r, None), x, jnp.ones((5, 1, 4)))[:1], "operation 'scan'"),
        (lambda x: (jax.lax.while_loop(lambda c: (c < 9).all(), lambda c: c * 2, x),), "operation 'while'"),
        (lambda x: (jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),), "operation 'cond'"),
        (lambda x: (jnp.broadcast_to(jnp.float32(1), (2 * x.shape[0], 4)).sum(0)[None] + x,), "or rows, got 2[*]rows"),
        (lambda x: ((x.astype(jnp.bfloat16) * 2).astype(jnp.float32),), "got 'convert_element_type' in bfloat16"),
        (lambda x: (x.astype(jnp.float16).astype(jnp.float32),), "got 'convert_element_type' in float16"),
        (lambda x: (x.astype(jnp.uint8).astype(jnp.float32),), r"to uint8 only numbers clipped to \[0, 255\]"),
        (lambda x: (jnp.minimum(x, 7).astype(jnp.int8),), r"to int8 only numbers clipped to \[-128, 127\]"),
    ],
)
def test_an_operation_without_a_translation_is_rejected_by_name(function, said):
    row = {"x": jax.ShapeDtypeStruct((4,), np.float32)}
    with pytest.raises(ExportError, match=said):
        model(function, row, row, {})
