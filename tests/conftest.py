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

from tests import ir_context, typechecker

pytest_plugins = ("tests.budget",)

# Until all tests are collected nothing becomes garbage.
gc.disable()
typechecker.install()
ir_context.share()
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples every time: a failure belongs to the change that it comes with.
hypothesis.settings.register_profile("the same", derandomize=True, database=None)
hypothesis.settings.load_profile("the same")

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup a closed terminal; some of them send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The longest files begin, so that both processes end at about the same time.
FIRST = (
    "tests/test_docs.py",
    "tests/test_examples.py",
    "tests/workers/test_ray.py",
    "tests/agents/test_actor_critics.py",
    "tests/cli/test_killed.py",
    "tests/studies/test_study.py",
    "tests/workers/test_worker_rollouts.py",
    "tests/train/test_learners.py",
    "tests/test_to_the_bit.py",
    "tests/agents/test_value_family.py",
    "tests/workers/test_asynchronous_loop.py",
    "tests/loops/test_compiled_seeds.py",
    "tests/workers/test_ray_learners.py",
    "tests/agents/test_on_policy.py",
    "tests/agents/test_dqn_prioritized.py",
    "tests/loops/test_host_replay.py",
    "tests/agents/test_dqn_recurrent.py",
    "tests/train/test_run.py",
    "tests/agents/test_normalized_replay.py",
    "tests/agents/test_ppo_options.py",
    "tests/agents/test_training_mode.py",
    "tests/cli/test_dqn.py",
    "tests/cli/test_flags.py",
    "tests/cli/test_train.py",
    "tests/cli/test_resume.py",
    "tests/loops/test_host_actor.py",
    "tests/loops/test_loops.py",
    "tests/agents/test_ppo_update.py",
)


def pytest_report_header(config):
    return {
        "not slow": "quick tests, about 10 minutes on two cores; `pytest -m slow` runs the others, about 25 minutes",
        "slow": "slow tests (documentation, examples, killed runs, Ray), about 25 minutes on two cores",
    }.get(config.option.markexpr, [])


def pytest_collection_finish():
    # What is loaded by now stays. To look through it for garbage while programs are traced takes a tenth of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    gc.enable()


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))
    if "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]:
        for item in items:
            if item.get_closest_marker("to_the_bit"):
                item.add_marker(pytest.mark.skip(reason="run by test_to_the_bit.py"))


@pytest.fixture(scope="session", autouse=True)
def _user_cache(tmp_path_factory):
    """Commands in processes of their own share compiled programs, and leave the user's cache directory alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        # Few programs of the tests are compiled twice; `tests.cli.processes` turns the cache on for its commands.
        patch.setenv("POLYAK_COMPILATION_CACHE", "0")
        yield


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs():
    """Drop the programs of earlier files above 6 GiB, or half of this process's share of the memory."""
    yield
    # Later files compile again what is dropped, so this is not done sooner.
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 2))
    limit = min(os.sysconf("SC_PHYS_PAGES") / 2 / processes, 6 * 2**30 / os.sysconf("SC_PAGE_SIZE"))
    if int(Path("/proc/self/statm").read_text().split()[1]) > limit:
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
