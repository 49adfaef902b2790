"""Pgx' games of one player as dynamics, with their masks of legal actions."""

from typing import Any

import jax

from polyak.core.spaces import Discrete, EnvSpec
from polyak.dynamics.foreign import ForeignDynamics, ForeignState, explain_missing, obs_space, own_promotion, raw_key
from polyak.dynamics.names import check_name, pgx_names


def dynamics(name: str, settings: dict[str, Any]) -> ForeignDynamics:
    """The dynamics of a game of Pgx, by name.

    Args:
        settings: arguments of its constructor, such as `sticky_action_prob` of MinAtar's games.

    Raises:
        ImportError: Pgx is not installed.
        ValueError: no such game, or one of several players.
        TypeError: no such setting.
    """
    with explain_missing("pgx", "Pgx"):
        import pgx
    if name not in pgx.available_envs():
        check_name("pgx", name, pgx_names())
    with own_promotion(f"pgx/{name}"):
        env = pgx.make(name)
        env = type(env)(**settings) if settings else env
    return dynamics_of(env, f"pgx/{name}")


def dynamics_of(env: Any, id: str) -> ForeignDynamics:
    """The dynamics of a game of `pgx.make`. MinAtar's games, in which every action is legal, have no mask.

    Raises:
        ValueError: the game has several players.
    """
    if env.num_players != 1:
        raise ValueError(f"make: {id} must be a game of one player, got one of {env.num_players}; polyak has no self-play")
    is_masked = not env.id.startswith("minatar-")

    def read(state: Any) -> ForeignState:
        # All actions are legal in a terminal state, where no action is chosen.
        return ForeignState(state, state.observation, state.legal_action_mask if is_masked else None)

    def reset_one(key: Any) -> ForeignState:
        return read(env.init(raw_key(key)))

    def step_one(key: Any, state: Any, action: Any) -> tuple[ForeignState, Any, Any, Any]:
        after = env.step(state, action, raw_key(key))
        return read(after), after.rewards[0], after.terminated, after.truncated & ~after.terminated

    with own_promotion(id):
        example = jax.eval_shape(reset_one, jax.random.key(0))
    num_actions = example.state.legal_action_mask.shape[0]
    spec = EnvSpec(obs_space(example.obs), Discrete(num_actions), id, has_action_mask=is_masked)
    return ForeignDynamics(env, None, spec, reset_one, step_one)
