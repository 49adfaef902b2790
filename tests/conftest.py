"""Every test runs strictly: no silent broadcasting or dtype change, warnings are errors, shapes in signatures checked."""

import os

# Eight host devices, so that sharded code has somewhere to go; before JAX starts, as it must be.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping
import pytest

import tests.typechecker  # noqa: F401  (the hook looks it up by name)

jaxtyping.install_import_hook("polyak", "tests.typechecker.check")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def unchecked(monkeypatch):
    """Without the tests' own type checker, which would be faster to object to a wrong argument."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
