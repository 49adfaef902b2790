"""Chooses the libraries with which MuJoCo and pygame draw images on a machine without a display."""

import functools
import importlib.util
import os
import subprocess
import sys

MUJOCO_GL = "MUJOCO_GL"
LIBRARIES = {"egl": "libegl1", "osmesa": "libosmesa6"}
"""Values of MUJOCO_GL that need no display, and the packages of Debian and Ubuntu that have the libraries."""

PROBE_SECONDS = 60


def has_display() -> bool:
    """Return True if this process can open windows, as far as the environment variables say."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def silence_pygame() -> None:
    """Let pygame draw into memory, without messages, if there is no display; Gymnasium's classic control draws with it."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if not has_display():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def choose_opengl() -> None:
    """Set the environment variable MUJOCO_GL to `egl` or `osmesa` if it is not set and there is no display.

    MuJoCo reads it when it draws its first image.

    Raises:
        RuntimeError: neither library works.
    """
    if os.environ.get(MUJOCO_GL) or has_display() or importlib.util.find_spec("mujoco") is None:
        return
    found = next(filter(_works, LIBRARIES), None)
    if found is None:
        raise RuntimeError(
            "MuJoCo cannot draw images: there is no display, and neither EGL nor OSMesa works; install one of them, e.g. "
            f"apt install {LIBRARIES['egl']} or apt install {LIBRARIES['osmesa']}"
        )
    os.environ[MUJOCO_GL] = found


@functools.cache
def _works(library: str) -> bool:
    """Draw nothing in a process of its own: a library that fails cannot be replaced in the process that has loaded it."""
    program = f"from mujoco.{library} import GLContext; GLContext(8, 8).make_current()"
    environ = {**os.environ, MUJOCO_GL: library}
    try:
        tried = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0
