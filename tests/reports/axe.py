"""axe-core in a page: `pip install axe-core-python` has its script, and AXE_CORE names another one, such as a newer version."""

import importlib.util
import os
from pathlib import Path

import pytest

FIND = """axe.run().then((done) => done.violations
    .filter((one) => ["serious", "critical"].includes(one.impact))
    .flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.html.slice(0, 160)} ${node.any.map((each) => each.message)}`)))
"""


def serious_findings(browser):
    """The serious and critical findings of axe in the open page; skips the test without its script."""
    browser.evaluate(_script().read_text() + "\n1")
    return browser.evaluate(FIND)


def _script():
    if "AXE_CORE" in os.environ:
        return Path(os.environ["AXE_CORE"])
    package = importlib.util.find_spec("axe_core_python")
    if package is None:
        pytest.skip("axe-core-python is not installed, and AXE_CORE names no axe.min.js")
    # The package is used for its script alone; its modules are for other browsers' drivers.
    return Path(package.origin).with_name("axe.min.js")
