"""Output streams without a reader: closed pipes and closed terminals."""

import os
import select


def is_broken_pipe(descriptor: int) -> bool:
    """Return True for a pipe that its reader has closed, as in `| head`."""
    poller = select.poll()
    poller.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def discard_output(*descriptors: int) -> None:
    """Redirect a stream without a reader, or a closed one, to /dev/null, because writing would raise."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(devnull, descriptor)
    if devnull not in descriptors:  # a closed descriptor's number is free
        os.close(devnull)
