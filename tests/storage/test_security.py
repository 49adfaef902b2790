"""Files from a stranger: nothing in them runs, nothing outside them is touched, nothing is allocated on their word alone.

And a scan of the source for every way by which a file could come to run code.
"""

import ast
import contextlib
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest

import polyak
from polyak.agents import agent_class
from polyak.storage import directory as layout
from polyak.storage.checkpoint import CheckpointError, read_manifest, restore, save, steps
from polyak.storage.config import ConfigError, from_json
from polyak.storage.directory import ARRAYS, COMMIT, MANIFEST
from polyak.storage.manifest import MAX_BYTES, MAX_LEAVES
from polyak.storage.run_directory import RunError, create, open_run
from polyak.storage.segments import SEGMENTS
from tests.storage.test_checkpoint import forge

SOURCE = Path(polyak.__file__).parent
LIKE = {"a": np.zeros(3, np.float32), "replay": np.zeros(1024, np.float32)}


class Payload:
    """Pickled, it runs a command when it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def payloads(marker):
    """Files that run code in one loader or another."""
    array = io.BytesIO()
    np.save(array, np.array([Payload(marker)], object), allow_pickle=True)
    command = f"touch {marker}"
    return {
        "pickle": pickle.dumps(Payload(marker)),
        "npy": array.getvalue(),
        "yaml": f'!!python/object/apply:os.system ["{command}"]'.encode(),
        "hydra": json.dumps({"_target_": "os.system", "command": command}).encode(),
        "class": json.dumps({"$class": "os.system", "command": command}).encode(),
        "python": f"__import__('os').system({command!r})".encode(),
        "dill in json": json.dumps({"format": 1, "meta": {"$bytes": pickle.dumps(Payload(marker)).hex()}}).encode(),
    }


@pytest.fixture
def run(tmp_path):
    """A run with everything in it, closed; its replay is in a segment."""
    with create(tmp_path / "run", {"seed": 1}) as made:
        made.append_metrics({"env_steps": 1})
        made.write_summary({"fps": 1.0})
        save(made.checkpoints, LIKE, step=1, meta={}, segmented="['replay']")
    return made.directory


def segment_of(checkpoints):
    """The file of the one segment."""
    (path,) = (checkpoints / SEGMENTS).iterdir()
    return path


def read_everything(directory):
    """Every way to read a run; whatever is wrong with it may only end in the errors that are promised."""
    promised = (CheckpointError, ConfigError, RunError)
    for read in (
        lambda: from_json(open_run(directory).read_config(), {}),
        lambda: open_run(directory).read_summary(),
        lambda: open_run(directory).read_metrics(),
        lambda: open_run(directory, write=True).close(),
        lambda: steps(directory / "checkpoints"),
        lambda: read_manifest(directory / "checkpoints"),
        lambda: restore(directory / "checkpoints", LIKE),
        lambda: restore(directory / "checkpoints", LIKE, step=1),
    ):
        with contextlib.suppress(*promised), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()


@pytest.mark.parametrize("kind", payloads("x"))
def test_a_payload_in_any_file_never_runs(run, tmp_path, kind):
    """Code among the data."""
    marker = tmp_path / "marker"
    payload = payloads(marker)[kind]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) >= 10 and segment_of(run / "checkpoints") in files
    for path in files:
        whole = path.read_bytes()
        for content in (payload, payload + whole, whole + payload):
            path.write_bytes(content)
            read_everything(run)
        path.write_bytes(whole)
    assert not marker.exists()


@pytest.mark.parametrize("kind", payloads("x"))
def test_a_payload_among_valid_hashes_never_runs(run, tmp_path, kind):
    marker = tmp_path / "marker"
    payload = payloads(marker)[kind]
    data = np.frombuffer(payload.ljust(4096, b"\0"), np.uint8)
    like = {"a": data, "replay": data}
    save(run / "checkpoints", like, step=1, meta={}, segmented="['replay']", overwrite=True)
    forge(run / "checkpoints", lambda document: document | {"meta": {"text": payload.decode("latin1")}})
    assert segment_of(run / "checkpoints").read_bytes().startswith(payload)
    read_everything(run)
    restored = restore(run / "checkpoints", like)
    assert restored.tree["a"].tobytes() == restored.tree["replay"].tobytes() == data.tobytes()
    assert not marker.exists()


def test_payloads_run_in_unsafe_loaders(tmp_path):
    loaders = {"pickle": "import pickle; pickle.loads({0!r})", "python": "eval({0!r})"}
    for kind, loader in loaders.items():
        marker = tmp_path / kind
        subprocess.run([sys.executable, "-c", loader.format(payloads(marker)[kind])], check=True)
        assert marker.exists()


@pytest.mark.parametrize("path", ["/../../escaped", "../../escaped", "/etc/passwd", "a\0b", "\x1b[2J", "C:\\x", "CON", "."])
def test_leaf_name_is_never_used_as_a_path(run, tmp_path, path):
    def change(document):
        document["leaves"][0]["path"] = path
        return document

    forge(run / "checkpoints", change)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"not expected|not printable|does not fit") as error:
        restore(run / "checkpoints", LIKE, step=1)
    assert all(line.isprintable() for line in str(error.value).splitlines())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [ARRAYS, MANIFEST, COMMIT])
def test_linked_files_are_rejected(run, tmp_path, name):
    path = run / "checkpoints" / layout.directory_name(1) / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert steps(run / "checkpoints") == []
    with pytest.raises(CheckpointError, match=f"{name} is a symbolic link"):
        restore(run / "checkpoints", LIKE)


def test_a_linked_step_is_rejected_and_never_pruned_through(run, tmp_path):
    path = run / "checkpoints" / layout.directory_name(1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        restore(run / "checkpoints", LIKE)
    save(run / "checkpoints", LIKE, step=2, meta={}, keep=1)
    assert len(os.listdir(tmp_path / "elsewhere")) == 3
    with pytest.raises(CheckpointError, match="exists and is not a polyak checkpoint"):
        save(run / "checkpoints", LIKE, step=1, meta={}, overwrite=True)


def test_planted_links_among_the_hidden_names_are_not_followed(run, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    checkpoints = run / "checkpoints"
    (checkpoints / ".tmp-000000000001-ab").symlink_to(precious)
    (checkpoints / ".replaced-000000000001").symlink_to(precious)
    save(checkpoints, LIKE, step=2, meta={})
    (checkpoints / ".lock").unlink()
    (checkpoints / ".lock").symlink_to(precious / "thesis.tex")
    with pytest.raises(CheckpointError, match="symbolic links"):
        save(checkpoints, LIKE, step=3, meta={})
    assert (precious / "thesis.tex").read_text() == "x"


def declare(size):
    """A change of the manifest: its array has so many bytes, and so has the file, it says."""

    def change(document):
        document["leaves"][0] |= {"dtype": "uint8", "shape": [size]}
        document["files"][ARRAYS]["size"] += size - 12 + len(str(size)) * 2
        return document

    return change


def declare_segment(size):
    """As `declare`, for the array in the segment, which has them all."""

    def change(document):
        document["leaves"][1] |= {"dtype": "uint8", "shape": [size]}
        return document | {"segment_bytes": size}

    return change


def bombs(checkpoints):
    """What a small file may claim, by name; each is planted when it is called."""
    path = checkpoints / layout.directory_name(1)

    def sparse():
        size = 10 * 2**30
        forge(checkpoints, declare(size))
        os.truncate(path / ARRAYS, json.loads((path / MANIFEST).read_bytes())["files"][ARRAYS]["size"])

    def sparse_segment():
        forge(checkpoints, declare_segment(10 * 2**30))
        os.truncate(segment_of(checkpoints), 10 * 2**30)

    def many_leaves():
        leaves = [{"path": f".{i}", "kind": "int", "value": 1} for i in range(MAX_LEAVES + 1)]
        forge(checkpoints, lambda document: document | {"leaves": leaves})

    def nested():
        text = b'{"format":' + b"[" * 1_000_000
        (path / MANIFEST).write_bytes(text)
        (path / COMMIT).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n")

    fill = {"$array": {"dtype": "uint8", "shape": [10 * 2**30], "fill": 0}}
    return {
        "10 GB declared": lambda: forge(checkpoints, declare(10 * 2**30)),
        "10 GB declared, in a sparse file": sparse,
        "10 GB declared of a segment": lambda: forge(checkpoints, declare_segment(10 * 2**30)),
        "10 GB declared of a sparse segment": sparse_segment,
        "segment of 10 GB": lambda: os.truncate(segment_of(checkpoints), 10 * 2**30),
        "2^60 declared of a segment": lambda: forge(checkpoints, declare_segment(2**60)),
        "2^60 declared": lambda: forge(checkpoints, declare(2**60)),
        "header of 2^60 bytes": lambda: (path / ARRAYS).write_bytes((2**60).to_bytes(8, "little") + b"{}"),
        "manifest of 10 GB": lambda: os.truncate(path / MANIFEST, 10 * 2**30),
        "manifest over the limit": lambda: os.truncate(path / MANIFEST, MAX_BYTES + 1),
        "commit of 10 GB": lambda: os.truncate(path / COMMIT, 10 * 2**30),
        "nested a million deep": nested,
        "a leaf too many": many_leaves,
        "10 GB of one value": lambda: forge(checkpoints, lambda document: document | {"meta": {"a": fill}}),
    }


@pytest.mark.parametrize("name", bombs(Path("x")))
def test_oversized_declarations_are_rejected(run, name):
    """Sizes that would fill memory."""
    bombs(run / "checkpoints")[name]()
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            restore(run / "checkpoints", LIKE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * 2**20
    assert time.process_time() - start < 20


def test_a_config_of_10_GB_is_rejected(run):
    os.truncate(run / "config.json", 10 * 2**30)
    with pytest.raises(RunError, match="at most 16777216 are read"):
        open_run(run).read_config()


# The source

MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"),
    *("runpy", "imp", "code", "codeop", "pydoc", "yaml", "torch", "tensorflow", "orbax"),
}
NAMES = {"eval", "exec", "compile", "__import__", "execfile", "__builtins__", "builtins"}
ATTRIBUTES = {
    *("import_module", "exec_module", "load_module", "run_module", "run_path", "find_spec", "spec_from_file_location"),
    *("unsafe_load", "full_load", "read_pickle", "to_pickle", "__reduce__", "__reduce_ex__", "__subclasses__"),
}
LOADERS = {("numpy", "load"), ("jax.numpy", "load"), ("numpy", "loadtxt"), ("numpy", "fromregex"), ("gymnasium", "load_env")}


def findings(source):
    """Every construct by which a file could come to run code: its line and name."""
    tree = ast.parse(source)
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
    return sorted((node.lineno, what) for node in ast.walk(tree) for what in _suspicions(node, modules))


def _suspicions(node, modules):
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names if alias.name.partition(".")[0] in MODULES | {"builtins"})
        case ast.ImportFrom(module=str(module), names=names):
            yield from [module] * (module.partition(".")[0] in MODULES | {"builtins"})
            imported = {alias.name for alias in names}
            yield from sorted(imported & (ATTRIBUTES | MODULES))
            yield from sorted(f"{m}.{name}" for m, name in LOADERS if m == module and name in imported)
        case ast.Name(id=name) if name in NAMES:
            yield name
        case ast.Attribute(attr=name) if name in ATTRIBUTES:
            yield name
        case ast.Attribute(value=ast.Name(id=base), attr=name) if (modules.get(base), name) in LOADERS:
            yield f"{base}.{name}"
        case ast.keyword(arg="allow_pickle"):
            yield "allow_pickle"
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]) if name in NAMES | ATTRIBUTES:
            yield f"getattr {name}"


# Gymnasium's `module:Name-v0`, typed by a person, imports the module; for names from files `import_modules=False` refuses it.
# So is the `module:name` of `polyak evaluate --policy`.
# The names are constants, keys of a table in the source, or typed by the user; none is read from a file.
ALLOWED = {
    "envs/host_batches.py": {"import_module"},
    "envs/constructors.py": {"import_module"},  # of `polyak.dynamics`, by the names of a table
    "envs/available.py": {"find_spec"},
    "dynamics/craftax.py": {"import_module"},  # the library's constants and renderer, of the game that was made
    "dynamics/names.py": {"find_spec"},
    "dynamics/opengl.py": {"find_spec"},
    # An unpickler that accepts tensors only, and `genops`, which reads a pickle's opcodes and runs none of them;
    # tests/importers/test_from_stable_baselines.py attacks it.
    "importers/from_stable_baselines.py": {"pickle", "pickletools"},
    # Functions and results, between a training and the processes that it has started; no file.
    "workers/rollout_worker.py": {"pickle", "cloudpickle"},
    "workers/worker_group.py": {"cloudpickle"},
    "workers/learner_group.py": {"pickle", "cloudpickle"},
    "workers/learner_process.py": {"pickle", "cloudpickle"},
    "workers/ray_learners.py": {"pickle", "cloudpickle"},
    "workers/ray_workers.py": {"find_spec"},
    # With allow_pickle=False; tests/data/test_loading.py attacks it.
    "data/files.py": {"allow_pickle"},
    "cli/imports.py": {"import_module"},
    "cli/agent_source.py": {"find_spec"},
    "agents/__init__.py": {"import_module"},
    "core/lazy.py": {"import_module"},
    "__init__.py": {"import_module"},
}


def test_an_agent_is_imported_only_if_it_is_in_the_table(tmp_path, monkeypatch):
    (tmp_path / "payload_agent.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("payload_agent:Agent", "payload_agent", "polyak.agents.ppo:PPO"):
        with pytest.raises(KeyError):
            agent_class(name)
    assert not (tmp_path / "ran").exists()


def test_no_source_file_can_run_what_it_reads():
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    found = [(path, line, what) for path, text in sources.items() for line, what in findings(text)]
    assert not [(path, line, what) for path, line, what in found if what not in ALLOWED.get(path, ())]


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import os, _pickle",
        "import cloudpickle",
        "import dill",
        "from joblib import load",
        "import shelve",
        "import marshal",
        "import torch",
        "from torch import load",
        "import torch.serialization as s",
        "import yaml\nyaml.load(f)",
        "from yaml import unsafe_load",
        "eval(text)",
        "exec(text)",
        "e = eval",
        "list(map(eval, texts))",
        "compile(text, 'x', 'exec')",
        "__import__(name)",
        "__builtins__['eval'](text)",
        "import builtins\nbuiltins.eval(text)",
        "from builtins import eval as e",
        "getattr(x, 'eval')(text)",
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module",
        "from importlib import import_module as load",
        "import importlib.util\nimportlib.util.spec_from_file_location('x', path)",
        "spec.loader.exec_module(module)",
        "import runpy\nrunpy.run_path(path)",
        "from pydoc import locate",
        "import numpy as np\nnp.load(path)",
        "import numpy\nnumpy.load(path)",
        "from numpy import load",
        "import jax.numpy as jnp\njnp.load(path)",
        "import numpy as np\nf(path, allow_pickle=True)",
        "import pandas\npandas.read_pickle(path)",
        "def f():\n    if x:\n        import pickle",
        "def f(self):\n    return self.__class__.__subclasses__()",
    ],
)
def test_the_scan_catches_planted_samples(planted):
    assert findings(textwrap.dedent(planted))


@pytest.mark.parametrize(
    "harmless",
    [
        "import json\njson.loads(text)",
        "from importlib import metadata\nmetadata.version('polyak')",
        "import re\nre.compile('a')",
        "jax.jit(f).lower(x).compile()",
        "policy.evaluate(env)",
        "model.eval()",
        "import numpy as np\nnp.frombuffer(data)",
        "snapshot.load(env)",
    ],
)
def test_the_scan_passes_harmless_code(harmless):
    assert findings(harmless) == []


def test_reading_everything_of_a_whole_run_raises_nothing(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_run(run).read_config() == {"seed": 1}
        assert restore(run / "checkpoints", LIKE).step == 1
