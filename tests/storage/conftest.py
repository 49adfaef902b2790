"""Disks that fill up, and users without rights."""

import os
import resource
from contextlib import contextmanager

import pytest


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
