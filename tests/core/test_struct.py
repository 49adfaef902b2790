import jax
import jax.numpy as jnp
import pytest

from polyak.core.struct import static, struct


@struct
class Settings:
    gamma: float = 0.9
    width: int = static(default=4)

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1], got {self.gamma}")


def test_fields_are_leaves_and_static_ones_structure():
    assert jax.tree.leaves(Settings()) == [0.9]
    assert jax.tree.structure(Settings()) == jax.tree.structure(Settings(0.5))
    assert jax.tree.structure(Settings()) != jax.tree.structure(Settings(width=5))


def test_paths_name_the_fields():
    ((path, _),) = jax.tree_util.tree_leaves_with_path(Settings())
    assert jax.tree_util.keystr(path) == ".gamma"


def test_validation_runs_for_people_and_not_for_jax():
    with pytest.raises(ValueError, match="gamma"):
        Settings(gamma=2.0)
    assert jax.tree.map(lambda x: x + 7, Settings()).gamma == 7.9


def test_a_new_float_does_not_recompile_and_a_new_static_does():
    traces = []

    @jax.jit
    def double(settings):
        traces.append(settings.width)
        return settings.gamma * 2

    double(Settings(0.1)), double(Settings(0.2)), double(Settings(width=5))
    assert traces == [4, 5]


def test_vmap_over_a_field():
    many = jax.tree.unflatten(jax.tree.structure(Settings()), [jnp.array([0.1, 0.2])])
    assert jnp.array_equal(jax.vmap(lambda s: s.gamma * 2)(many), jnp.array([0.2, 0.4]))


def test_unknown_field_suggests_the_right_one():
    with pytest.raises(TypeError, match=r"Settings: unknown field 'gama'; did you mean 'gamma'\? \(fields: gamma, width\)"):
        Settings(gama=0.5)
