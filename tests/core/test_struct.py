import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from polyak.core.struct import check_settings, choice, integer, number, setting, static, struct


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


@struct
class Checked:
    """Every kind of setting that is checked."""

    rate: float = number(default=0.5, at_least=0, at_most=1)
    limit: float | None = number(default=None, above=0, optional=True)
    clip: float = number(default=10.0, above=0, static=True)
    count: int = integer(default=3)
    kind: str | None = choice(default="a", choices=("a", "b", None))
    even: int = setting(default=2, check=lambda owner, name, value: _check_even(owner, name, value), static=True)

    def __post_init__(self) -> None:
        check_settings(self)


def _check_even(owner, name, value):
    if value % 2:
        raise ValueError(f"{owner}: {name} must be even, got {value}")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rate": 1.5}, r"Checked: rate must be a number in \[0, 1\], got 1.5"),
        ({"rate": None}, "Checked: rate must be a number .*got None"),
        ({"limit": 0.0}, "Checked: limit must be .*got 0.0"),
        ({"clip": -1.0}, "Checked: clip must be .*got -1.0"),
        ({"count": 0}, r"Checked: count must be an integer in \[1, 2147483647\], got 0"),
        ({"count": 2.0}, r"Checked: count must be an integer in \[1, 2147483647\], got 2.0"),
        ({"kind": "c"}, "Checked: kind must be one of 'a', 'b', None, got 'c'"),
        ({"even": 3}, "Checked: even must be even, got 3"),
        ({"limit": -1.0, "rate": 2.0}, "Checked: rate"),
    ],
)
def test_a_wrong_setting_is_rejected_by_its_owner_and_name_the_first_one_first(monkeypatch, wrong, said):
    # The tests' own type checker would be faster to object.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises((TypeError, ValueError), match=said):
        Checked(**wrong)


def test_checked_numbers_are_leaves_unless_static_and_integers_and_choices_are_structure():
    leaves = jax.tree_util.tree_leaves_with_path(Checked(limit=2.0))
    assert [(jax.tree_util.keystr(path), x) for path, x in leaves] == [(".rate", 0.5), (".limit", 2.0)]
    same = jax.tree.structure(Checked())
    assert same == jax.tree.structure(Checked(rate=0.1))
    assert all(same != jax.tree.structure(Checked(**change)) for change in ({"clip": 5.0}, {"count": 4}, {"kind": None}))


def test_an_optional_number_may_be_none_and_any_number_may_be_an_array():
    assert Checked(limit=None).limit is None
    assert Checked(rate=jnp.array([0.1, 0.2])).rate.shape == (2,)
    with pytest.raises(ValueError, match="Checked: rate"):
        Checked(rate=jnp.array([0.1, 1.2]))


def test_static_numpy_scalars_become_python_values(unchecked):
    settings = Checked(count=np.int64(4), clip=np.float32(2.5), kind=np.str_("b"), even=np.uint8(8))
    assert [type(x) for x in (settings.count, settings.clip, settings.kind, settings.even)] == [int, float, str, int]
    assert settings == Checked(count=4, clip=2.5, kind="b", even=8)
    with pytest.raises(TypeError, match=r"Checked: count must be an integer .*got 2.0"):
        Checked(count=np.float64(2.0))


@struct(kw_only=True)
class Group:
    """A group.

    Attributes:
        spec: where it stands.
        gamma: the discount.
        width: how wide.
    """

    spec: str = static(default="here", kw_only=False)
    gamma: float = number(default=0.9, at_least=0, at_most=1)
    width: int = integer(default=4)

    def __post_init__(self) -> None:
        check_settings(self)


@struct(kw_only=True)
class Leaf(Group):
    """A leaf.

        y = x

    Attributes:
        depth: how deep.
        width: how wide a leaf is.

    Raises:
        ValueError: a setting is out of range.
    """

    depth: int = integer(default=2)
    gamma: float = 0.5
    width: int


def test_a_plain_value_changes_the_default_of_an_inherited_field_and_keeps_its_check():
    leaf = Leaf("there", width=3)
    assert (leaf.spec, leaf.gamma, leaf.width, leaf.depth) == ("there", 0.5, 3, 2) and Group().gamma == 0.9
    assert jax.tree.leaves(leaf) == [0.5]
    with pytest.raises(ValueError, match=r"Leaf: gamma must be a number in \[0, 1\], got 2.0"):
        Leaf(gamma=2.0)
    assert repr(Leaf()) == "Leaf()" and repr(Leaf(gamma=0.9)) == "Leaf(gamma=0.9)"
    with pytest.raises(TypeError, match="positional"):
        Leaf("there", 0.5)


def test_texts_of_inherited_fields_stand_in_the_docstring_by_the_order_of_their_classes():
    lines = [line.strip() for line in Leaf.__doc__.splitlines()]
    wanted = ["spec: where it stands.", "depth: how deep.", "gamma: the discount.", "width: how wide a leaf is."]
    assert lines[lines.index("Attributes:") + 1 :][:4] == wanted
    assert lines[lines.index("Attributes:") + 6] == "Raises:" and "y = x" in lines
