"""How the code is built: sizes, settings, protocols, duplicates, and the way from an agent's `update` to its loss.

Run `python benchmarks/structure.py [--src DIR]`, with DIR the folder `src/polyak` of another commit to measure that. Lines are
lines of code. Settings are fields of the agents' classes with a default. Duplicates are pairs of files with six equal lines of
code in a row. The import closure is a module, the modules that it imports, and those that they import. Calls and files are what
stands on the stack between `update` and the loss, both included, while the update is traced.
"""

import argparse
import ast
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from code_to_read import code_lines

ROOT = Path(__file__).parents[1]
AGENTS = {"PPO": "ppo", "DQN": "dqn", "SAC": "sac", "TD3": "td3"}
EQUAL_LINES = 6

TRACE = """
import json, sys, traceback
import jax, jax.numpy as jnp
import polyak
from polyak.core.types import Rollout, TimeStep
name, loss, source = sys.argv[1:]
is_discrete = name in ("PPO", "DQN")
env_id, scaling = ("jax/CartPole-v1", "clip") if is_discrete else ("jax/Pendulum-v1", "rescale")
env = polyak.envs.make(env_id, num_envs=2, action_scaling=scaling)
kind, found = getattr(polyak, name), []
original = getattr(kind, loss)

def recorded(self, *args, **kwargs):
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(source)]
    names = [frame.name for frame in frames]
    start = names.index("update") if "update" in names else next(i for i, x in enumerate(names) if x.startswith("update_"))
    found.append(frames[start:])
    return original(self, *args, **kwargs)

setattr(kind, loss, recorded)
capacity = {"replay": polyak.UniformReplay(1000)} if "replay" in kind.__dataclass_fields__ else {"capacity": 1000}
agent = kind(env.spec, num_steps=8, **({"num_minibatches": 2} if name == "PPO" else capacity))
obs, flags = jnp.zeros((9, 2, *env.spec.obs.shape)), jnp.zeros((9, 2), bool)
action = jnp.zeros((8, 2), jnp.int32) if is_discrete else jnp.zeros((8, 2, 1))
rollout = Rollout(TimeStep(obs, jnp.zeros((9, 2)), flags, flags, flags), action)
jax.eval_shape(agent.update, agent.init(jax.random.key(0)), rollout, jax.random.key(0))
print(json.dumps([len(found[0]) + 1, len({frame.filename for frame in found[0]} | {sys.modules[kind.__module__].__file__})]))
"""
"""Prints the calls and files between an agent's update and its loss."""


def modules(src: Path) -> dict[str, ast.Module]:
    """The syntax trees of all modules by name, such as `polyak.agents.ppo`."""
    files = sorted(src.rglob("*.py"))
    names = [".".join(file.relative_to(src.parent).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return {name: ast.parse(file.read_text()) for name, file in zip(names, files, strict=True)}


def settings(trees: dict[str, ast.Module]) -> Counter[str]:
    """The number of classes in the room of agents that declare each setting."""
    found: Counter[str] = Counter()
    for name, tree in trees.items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if ".agents" in name else []
        for node in classes:
            items = [item for item in node.body if isinstance(item, ast.AnnAssign) and item.value is not None]
            fields = [item for item in items if "ClassVar" not in ast.unparse(item.annotation)]
            found.update(item.target.id for item in fields if isinstance(item.target, ast.Name))
    return found


def protocols(trees: dict[str, ast.Module]) -> int:
    """The number of protocols."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return sum("Protocol" in ast.unparse(base).split("[")[0] for node in classes for base in node.bases[-1:])


def duplicate_pairs(src: Path) -> int:
    """The number of pairs of files that share six lines of code in a row."""
    places: dict[tuple[str, ...], set[Path]] = {}
    for file in src.rglob("*.py"):
        numbers, text = sorted(code_lines(file)), file.read_text().splitlines()
        lines = [text[number - 1].strip() for number in numbers]
        lines = [line for line in lines if not line.startswith(("import ", "from ")) and len(line) > 3]
        for start in range(len(lines) - EQUAL_LINES + 1):
            places.setdefault(tuple(lines[start : start + EQUAL_LINES]), set()).add(file)
    return len({pair for files in places.values() for pair in itertools.combinations(sorted(files), 2)})


def import_closure(trees: dict[str, ast.Module], start: str) -> set[str]:
    """The modules that a module imports, and those that they import, itself included."""
    found, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in trees or name in found:
            continue
        found.add(name)
        for node in trees[name].body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polyak"):
                waiting += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found - {"polyak"}


def way_to_the_loss(src: Path, agent: str) -> tuple[int, int]:
    """Calls and files of polyak from the agent's `update` to its loss."""
    loss = "loss" if agent in ("PPO", "DQN") else "critic_loss"
    environment = os.environ | {"PYTHONPATH": str(src.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRACE, agent, loss, str(src)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    calls, files = json.loads(done.stdout.splitlines()[-1])
    return calls, files


def main() -> None:
    parser = argparse.ArgumentParser(description="How the code is built.")
    parser.add_argument("--src", type=Path, default=ROOT / "src/polyak")
    src = parser.parse_args().src.resolve()
    trees = modules(src)
    sizes = {file: len(code_lines(file)) for file in src.rglob("*.py")}
    files = {".".join(file.relative_to(src.parent).with_suffix("").parts).removesuffix(".__init__"): file for file in sizes}
    declared = settings(trees)
    print(f"polyak: {len(sizes)} files, {sum(sizes.values())} lines of code")
    for room in ("agents", "learning", "copies"):
        print(f"{room}: {sum(lines for file, lines in sizes.items() if (src / room) in file.parents)} lines of code")
    print(f"settings of agents: {declared.total()} declared, {len(declared)} distinct")
    print(f"protocols: {protocols(trees)}")
    print(f"pairs of files with duplicates: {duplicate_pairs(src)}")
    for agent, module in AGENTS.items():
        closure = import_closure(trees, f"polyak.agents.{module}")
        lines = sum(sizes[files[name]] for name in closure)
        calls, between = way_to_the_loss(src, agent)
        print(f"{agent}: {calls} calls in {between} files from update to the loss; imports {len(closure)} files, {lines} lines")


if __name__ == "__main__":
    main()
