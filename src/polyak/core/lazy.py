"""Names of a package that are imported when they are used."""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_attribute(package: str, modules: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: it imports a name from the module of the package that lists it."""

    def get(name: str) -> Any:
        for module, names in modules.items():
            if name in names:
                return getattr(importlib.import_module(f"{package}.{module}"), name)
        from polyak.core.suggestions import missing_from_module

        raise AttributeError(missing_from_module(package, name, vars(sys.modules[package])["__all__"]))

    return get
