"""Virtual environments of the libraries that polyak is measured against, made from PyPI beside this file.

    python benchmarks/peers.py             # all of them; what is up to date stays
    python benchmarks/peers.py sb3 rejax   # some

The benchmarks call `python_of(peer)`, which makes the environment when it is not there yet; one that can do without a peer
calls `python_if_possible(peer)`.
"""

import argparse
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Each is installed in steps: torch first and alone, so that nothing else decides which build of it comes (the one for CPUs is
# 200 MB, the one for GPUs brings 5 GB).
FIRST = {
    "sb3": "torch==2.13.0",
    "sbx": "torch==2.13.0",
    "rllib": "torch==2.13.0",
    "rejax": None,
    "tf_agents": None,
    "rliable": None,
    "d3rlpy": "torch==2.13.0",
}
# What has had no release for younger Pythons.
NEEDS = {"tf_agents": "python3.11"}


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, which is made or made anew if its requirements have changed.

    Raises:
        SystemExit: pip could not install it, or it needs another Python that is not there; says which, and what pip said.
    """
    home = HERE / f".venv-{peer}"
    requirements = HERE / f"requirements-{peer}.txt"
    python = home / "bin" / "python"
    maker = _maker(peer)
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    stamp = home / "requirements.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"peers: installing {peer} into {home.relative_to(HERE.parent)} (once; some minutes)", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    _run(peer, [maker, "-m", "venv", str(home)])
    first = FIRST[peer]
    if first is not None:
        _run(peer, [str(python), "-m", "pip", "install", "--quiet", first])
    _run(peer, [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)])
    stamp.write_text(wanted)
    return python


@functools.cache
def python_if_possible(peer: str) -> Path | None:
    """As `python_of`, or None where that fails; then it says why."""
    try:
        return python_of(peer)
    except SystemExit as error:
        print(f"{error}\npeers: going on without {peer}", file=sys.stderr, flush=True)
        return None


def _maker(peer: str) -> str:
    """The interpreter that makes a peer's environment: this one, if it will do."""
    needs = NEEDS.get(peer)
    if needs is None or needs == f"python{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    found = shutil.which(needs)
    if found is None:
        raise SystemExit(f"peers: {peer}: needs {needs}, which is not on PATH")
    return found


def _run(peer: str, command: list[str]) -> None:
    # A PYTHONPATH of the caller would put other packages before the pinned ones.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
        raise SystemExit(f"peers: {peer}: {' '.join(command)} failed with {done.returncode}:\n{said}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the peers' virtual environments.")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"any of {', '.join(FIRST)}; default: all")
    names = parser.parse_args().peers or list(FIRST)
    unknown = [name for name in names if name not in FIRST]
    if unknown:
        parser.error(f"unknown peer {unknown[0]!r}; there are {', '.join(FIRST)}")
    for name in names:
        print(f"{name}: {python_of(name).relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
