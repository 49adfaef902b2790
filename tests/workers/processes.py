"""What the system knows of processes: children, and addresses on which they listen."""

import os
from pathlib import Path


def descendants(pid):
    """The processes that a process has started, and theirs."""
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found += new
        waiting += new
    return found


def is_running(pid):
    """Whether a process is there, and has not ended unseen by its parent."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def read(path):
    """The text of a file; empty if it is gone."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def listening(pids):
    """The addresses on which processes listen."""
    return sorted({address for address, _ in endpoints(pids)})


def endpoints(pids):
    """The addresses and ports on which processes listen."""
    inodes = sockets(pids)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                numbers, port = fields[1].split(":")
                places = range(len(numbers) - 2, len(numbers) - 10, -2)
                found.add((".".join(str(int(numbers[i : i + 2], 16)) for i in places), int(port, 16)))
    return sorted(found)


def sockets(pids):
    """The inodes of all sockets of processes."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes
