"""Output streams that nobody reads any more: closed pipes and closed terminals."""

import os
import select


def is_broken_pipe(descriptor: int) -> bool:
    """Whether it is a pipe whose reader has closed it, as after `| head`."""
    poller = select.poll()
    poller.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def discard_output(*descriptors: int) -> None:
    """Redirect to /dev/null: nobody can read it, and writing would raise."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(devnull, descriptor)
    os.close(devnull)
