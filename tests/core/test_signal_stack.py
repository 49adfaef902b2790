"""Signals do not change the results of JAX once their handlers have a separate stack."""

import os
import subprocess
import sys

import pytest

HAS_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

def has_stack():
    stack = Stack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack)) == 0
    return bool(stack.start)

assert not has_stack()
"""
IN_COMMAND = "from polyak.cli.signals import handle_signals\nwith handle_signals(): assert has_stack()"
IN_PYTHON = """
import threading
from polyak.train.interrupt import catch_interrupt

def train():
    with catch_interrupt(): assert not has_stack()

thread = threading.Thread(target=train)
thread.start(); thread.join()
with catch_interrupt(): assert has_stack()
"""
ABORTS = """
import faulthandler, os, sys
from polyak.core.signal_stack import use_signal_stack
faulthandler.enable(open(sys.argv[1], "w"))
use_signal_stack()
os.abort()
"""
# Products whose left matrix is transposed, in the main thread, as in the gradients of a host loop.
PRODUCTS = """
import os, signal, subprocess, sys, time
import jax, jax.numpy as jnp, numpy as np
from polyak.core.signal_stack import use_signal_stack

jax.config.update("jax_cpu_enable_async_dispatch", False)
use_signal_stack()
signals = 0

def count(number, frame):
    global signals
    signals += 1

signal.signal(signal.SIGUSR1, count)
programs = []
for width in (23, 256):
    x, y = (jax.random.normal(jax.random.key(i), (256, size)) for i, size in enumerate((width, 256)))
    product = jax.jit(lambda x, y: x.T @ y)
    programs.append((product, x, y, np.array(product(x, y))))
send = f"import os, time\\nwhile True: time.sleep(0.001); os.kill({os.getpid()}, {int(signal.SIGUSR1)})"
sender = subprocess.Popen([sys.executable, "-c", send], stderr=subprocess.DEVNULL)
try:
    while signals < 1000:
        for product, x, y, expected in programs:
            np.testing.assert_array_equal(product(x, y), expected)
finally:
    sender.kill()
    sender.wait()
"""


def run(program):
    env = os.environ | {"PYTHONFAULTHANDLER": "", "PYTHONDEVMODE": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", [IN_PYTHON, IN_COMMAND], ids=["Python", "command"])
def test_a_training_has_a_stack_for_signals_in_the_main_thread(program):
    run(HAS_STACK + program)


def test_the_file_that_a_program_has_given_to_faulthandler_is_kept(tmp_path):
    done = subprocess.run([sys.executable, "-c", ABORTS, tmp_path / "log"], capture_output=True, text=True, timeout=60)
    assert done.returncode < 0 and done.stderr == "" and "Fatal Python error" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_thousand_signals_change_no_product():
    run(PRODUCTS)
