import sys

import jax
import numpy as np

from polyak.storage.files import dump_json
from polyak.storage.system import describe_system, library_version, machine_shape, package_version


def test_versions_are_those_installed():
    assert package_version("jax") == jax.__version__
    assert package_version("numpy") == np.__version__
    assert package_version("no-such-package-anywhere") is None
    assert library_version() == package_version("polyak")


def test_the_description_is_json_and_names_machine_and_command():
    system = describe_system()
    dump_json(system, "system.json")
    assert system["command_line"] == sys.argv
    assert (system["devices"], system["device_kinds"]) == (jax.device_count(), ["cpu"])
    assert set(system["packages"]) >= {"polyak", "jax", "numpy", "flax", "optax", "gymnasium"}


def test_the_machine_s_shape_counts_its_devices():
    assert machine_shape() == {"platform": "cpu", "devices": jax.device_count(), "processes": 1}
