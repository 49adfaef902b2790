"""RMSProp as TensorFlow 1 has it, the optimizer of IMPALA and A2C."""

import optax

from polyak.core.types import Scalar
from polyak.ops.gradient_step import BoundedOptimizer, clip_and_descend
from polyak.ops.schedules import Count, Schedule


def rmsprop(
    learning_rate: Schedule,
    env_steps: Count = 0,
    *,
    decay: Scalar,
    eps: Scalar,
    max_grad_norm: Scalar | None,
) -> BoundedOptimizer:
    """The RMSProp of TensorFlow 1 after clipping by the global norm, on the parameters as one vector.

        v ← α v + (1-α) g²,   p ← p - lr · g / √(v + ε),   v = 1 at first

    ε is inside the root and v begins at 1, so that first steps are small; in PyTorch ε is outside and v begins at 0.

    Args:
        learning_rate: lr; the state does not hold it.
        env_steps: the argument of a schedule; it may be traced.
        decay: α.
        eps: ε.
        max_grad_norm: the gradient is scaled down to this Euclidean norm; None leaves it as it is.

    Source: Tieleman and Hinton 2012, lecture 6.5; `RMSPropOptimizer` of TensorFlow 1, `RMSpropTFLike` of Stable-Baselines3.
    """
    scale = optax.scale_by_rms(decay=decay, eps=eps, initial_scale=1.0)
    return clip_and_descend(scale, learning_rate, env_steps, max_grad_norm)
