"""Every test runs strictly: no silent broadcasting or dtype change, warnings are errors, shapes in signatures checked.

XLA is told to hurry: nearly all of a test's time is compiling a program that then runs for milliseconds. What is promised to
the bit is promised with the compiler as users have it; such tests are marked `to_the_bit` and run by `test_to_the_bit.py`.
"""

import gc
import os
import resource
import signal
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

# Eight host devices, so that sharded code has somewhere to go; before JAX starts, as it must be.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    # A flag that XLA does not know ends the process.
    + (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        if version("jaxlib").startswith("0.10.")
        else ""
    ),
)

# Where in Python an operation was written is in no test, and takes some of the time of tracing and lowering.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import hypothesis
import jax
import jaxtyping
import pytest

from tests import typechecker

# Until all tests are collected nothing becomes garbage.
gc.disable()
typechecker.install()
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples every time: a failure belongs to the change that it comes with.
hypothesis.settings.register_profile("the same", derandomize=True, database=None)
hypothesis.settings.load_profile("the same")

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup a closed terminal; some of them send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Files that take twenty seconds and more.
LONGEST = (
    "test_killed.py",
    "test_ppo_options.py",
    "test_ppo_memory.py",
    "test_to_the_bit.py",
    "test_loops.py",
    "test_train.py",
    "test_actor_critic.py",
    "test_docs.py",
    "test_flags.py",
    "test_examples.py",
    "test_users_week.py",
    "test_run.py",
    "test_seeds.py",
)


def pytest_collection_finish():
    # What is loaded by now stays. To look through it for garbage while programs are traced takes a tenth of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    gc.enable()


def pytest_collection_modifyitems(items):
    # So that both processes end at about the same time.
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]:
        for item in items:
            if item.get_closest_marker("to_the_bit"):
                item.add_marker(pytest.mark.skip(reason="run by test_to_the_bit.py"))


@pytest.fixture(scope="session", autouse=True)
def _user_cache(tmp_path_factory):
    """Commands in processes of their own share compiled programs, and leave the user's cache directory alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs():
    """Those of earlier files are dropped where they take much memory: each of the two processes would grow beyond 8 GiB."""
    yield
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if pages * os.sysconf("SC_PAGE_SIZE") > 4 * 2**30:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def unchecked(monkeypatch):
    """Without the tests' own type checker, which would be faster to object to a wrong argument."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def full_disk():
    """A context in which no file of this process may grow beyond `size` bytes."""

    @contextmanager
    def limit(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def nobody():
    """A context in which this process is not the superuser, to whom permissions mean nothing."""

    @contextmanager
    def as_nobody():
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)

    return as_nobody
