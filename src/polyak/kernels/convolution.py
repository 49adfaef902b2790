"""Strided convolutions whose gradient is fast on a CPU, in place of `jax.lax.conv_general_dilated`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Image = Float[Array, "B H W C"]
Kernel = Float[Array, "k k C O"]
Output = Float[Array, "B h w O"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x: Image, kernel: Kernel, stride: int) -> Output:
    """y[b, i, j, o] = Σ_{u, v, c} x[b, i·s + u, j·s + v, c] · kernel[u, v, c, o], without padding.

    Replaces `jax.lax.conv_general_dilated`, equal up to rounding, with the same gradients; forward-mode derivatives
    (`jax.jvp`) are an error. On a CPU, under `jax.grad`, the convolution is one matrix product and its gradient two. Without a
    gradient, XLA's convolution is faster and is used.

    Gain: the gradient of a strided convolution is a dilated one, which XLA computes number by number on a CPU: 8.4 s for the
    three convolutions of `NatureCNN` and 256 images of 84x84, 0.2 s here. Delete it when `jax.grad` of
    `conv_general_dilated` takes less than that on a CPU.

    Args:
        kernel: its side is a multiple of the stride.
    """
    return _convolution(x, kernel, stride)


def _convolution(x: Image, kernel: Kernel, stride: int) -> Output:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _forward(x: Image, kernel: Kernel, stride: int) -> tuple[Array, tuple[Array, Array]]:
    on_cpu, elsewhere = (functools.partial(function, stride=stride) for function in (_by_product, _convolution))
    return _on_platform(on_cpu, elsewhere, x, kernel), (x, kernel)


def _backward(stride: int, inputs: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    def of_convolution(x: Array, kernel: Array, dy: Array) -> Any:
        return jax.vjp(functools.partial(_convolution, stride=stride), x, kernel)[1](dy)

    return _on_platform(functools.partial(_gradient_by_products, stride=stride), of_convolution, *inputs, dy)


def _on_platform(on_cpu: Any, elsewhere: Any, *arrays: Array) -> Any:
    return jax.lax.platform_dependent(*arrays, cpu=on_cpu, default=elsewhere)


def _by_product(x: Image, kernel: Kernel, stride: int) -> Output:
    """The convolution as products of rows of blocks and rows of the kernel; an output is a sum of n shifted products."""
    size, outputs = kernel.shape[0] // stride, kernel.shape[-1]
    strips = _strips(x, kernel.shape[0], stride)
    products = strips @ _matrix(kernel, stride)
    rows = strips.shape[1] - size + 1
    parts = [products[:, i : i + rows, :, i * outputs : (i + 1) * outputs] for i in range(size)]
    return functools.reduce(jnp.add, parts)


def _gradient_by_products(x: Image, kernel: Kernel, dy: Output, stride: int) -> tuple[Array, Array]:
    size = kernel.shape[0] // stride
    shifts = [((0, 0), (i, size - 1 - i), (0, 0), (0, 0)) for i in range(size)]
    d_products = jnp.concatenate([jnp.pad(dy, shift) for shift in shifts], axis=-1)
    strips, transpose_strips = jax.vjp(lambda x: _strips(x, kernel.shape[0], stride), x)
    matrix, transpose_matrix = jax.vjp(lambda kernel: _matrix(kernel, stride), kernel)
    # In this order the sum over all pixels is three times as fast as with the factors exchanged; XLA would exchange them.
    rows, columns = (x.reshape(-1, x.shape[-1]) for x in (strips, d_products))
    d_matrix = jax.lax.optimization_barrier(jax.lax.dot_general(columns, rows, (((0,), (0,)), ((), ())))).T
    (dx,), (d_kernel,) = transpose_strips(d_products @ matrix.T), transpose_matrix(d_matrix)
    return dx, d_kernel


def _strips(x: Image, side: int, stride: int) -> Float[Array, "B h w depth"]:
    """Blocks of stride x stride pixels, each concatenated with the next blocks of its row that the kernel covers."""
    batch, height, width, channels = x.shape
    size = side // stride
    columns = (width - side) // stride + 1
    h, w = (height - side) // stride + size, columns + size - 1
    x = x[:, : h * stride, : w * stride].reshape(batch, h, stride, w, stride, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, h, w, stride * stride * channels)
    # Otherwise the blocks would be made anew for each of the columns.
    x = jax.lax.optimization_barrier(x)
    return jnp.concatenate([x[:, :, j : j + columns] for j in range(size)], axis=-1)


def _matrix(kernel: Kernel, stride: int) -> Float[Array, "depth outputs"]:
    """The kernel as a matrix for strips, its rows of blocks concatenated."""
    side, _, channels, outputs = kernel.shape
    size = side // stride
    kernel = kernel.reshape(size, stride, size, stride, channels, outputs).transpose(2, 1, 3, 4, 0, 5)
    return kernel.reshape(size * stride * stride * channels, size * outputs)


convolve.defvjp(_forward, _backward)
