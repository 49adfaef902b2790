"""Which software and which machine: what a run records so that it can be explained later. Never environment variables."""

import os
import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

_PACKAGES = ("polyak", "jax", "jaxlib", "numpy", "flax", "optax", "gymnasium")


@cache
def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def library_version() -> str:
    """The version of polyak itself."""
    return package_version("polyak") or "unknown"


def machine_shape() -> dict[str, Any]:
    """What the bits of a result may depend on: the platform and the number of devices and processes."""
    return {"platform": jax.default_backend(), "devices": jax.device_count(), "processes": jax.process_count()}


def describe_system(*, devices: bool = True) -> dict[str, Any]:
    """Versions, machine and command line, as JSON data.

    Args:
        devices: JAX's too, which starts JAX: after that, how many there are can no longer be set.
    """
    system = {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "cpu": platform.machine(),
        "cpu_count": os.cpu_count(),
        "command_line": sys.argv,
    }
    if devices:
        system |= machine_shape() | {"device_kinds": sorted({device.device_kind for device in jax.devices()})}
    return system
