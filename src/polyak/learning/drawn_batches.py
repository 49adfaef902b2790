"""What an agent does in the memory of its replay, where that is not the memory in which it learns."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, UInt32

from polyak.core.types import Rollout
from polyak.learning.check_rollout import as_arrays
from polyak.learning.normalizers import without_returns
from polyak.learning.off_policy import OffPolicySettings, draw_options, is_due, keys_of_steps
from polyak.ops.schedules import saturating_add
from polyak.replay.drawn import DrawnBatches, Errors
from polyak.replay.replay import ReplayState, Transition


def draw_batches(
    settings: OffPolicySettings, replay: ReplayState, rollout: Rollout, key: PRNGKeyArray, env_steps: UInt32[Array, ""]
) -> tuple[ReplayState, DrawnBatches]:
    """The replay with a rollout, and the batches that `update` would draw of it: it takes them in place of the replay.

    Where the update takes no gradient steps, nothing is drawn: the batches are zeros.

    Args:
        replay: donate it; it is updated in place.
        rollout: `[T, B]` transitions, as for `update`.
        key: likewise.
        env_steps: of the agent's state before the update.
    """
    rollout = as_arrays(rollout)
    ring = settings.replay
    before, replay = replay.dropped, ring.add(replay, without_returns(settings, rollout))
    num_envs = rollout.reward.shape[1]
    env_steps = saturating_add(env_steps, rollout.valid.sum(dtype=jnp.uint32))
    options = draw_options(settings, env_steps, num_envs)
    is_learning = is_due(settings, env_steps, replay.size, num_envs)

    def draw(keys: Array) -> Transition:
        # One after another: together they would need the memory of all while they are drawn.
        batches: Transition = jax.lax.map(lambda key: ring.sample(replay, key, settings.batch_size, **options), keys)
        return batches

    def wait(keys: Array) -> Transition:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, keys))

    batches = jax.lax.cond(is_learning, draw, wait, keys_of_steps(settings, key, num_envs)[:, 0])
    drawn = DrawnBatches(
        batches=batches,
        size=replay.size,
        dropped=before,
        newly_dropped=replay.dropped - before,
        env_steps=env_steps,
        metrics=ring.metrics(replay),
        priorities=Errors(
            index=batches.index,
            sizes=jnp.zeros(batches.weight.shape, jnp.float32),
            count=jnp.zeros((), jnp.int32),
            is_due=is_learning,
        ),
    )
    return replay, drawn


def return_errors(settings: OffPolicySettings, replay: ReplayState, errors: Errors) -> ReplayState:
    """The replay with the priorities of the batches that were drawn from it, after the update that learned from them.

    Those of one gradient step do not change what the others of the update draw, unlike with a replay in the agent's state.

    Args:
        replay: donate it.
        errors: `DrawnBatches.priorities` of the state after the update.
    """
    if not settings.replay.has_priorities:
        return replay

    def set_priorities(replay: ReplayState, batch: tuple[Array, Array]) -> tuple[ReplayState, None]:
        return settings.replay.set_priorities(replay, *batch, due=errors.is_due), None

    return jax.lax.scan(set_priorities, replay, (errors.index, errors.sizes))[0]
