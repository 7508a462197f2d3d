"""python supervise.py WALL_S FILE_BYTES MEMORY_BYTES FOLDER -- COMMAND: run it within limits, and leave nothing of it.

It ends when the command does, when the time is up, or when its own stdin is closed: so it goes with the grader, however that
ends. Then every process that came from the command is killed, also one that has made itself a session of its own or whose
parent is gone: on Linux those fall to this process (a "subreaper"). FOLDER, the scratch folder, is removed. Nothing of minikv
is imported, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time

TIME_IS_UP = 124
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """The command's exit status, or ``TIME_IS_UP``."""
    wall_s, file_bytes, memory_bytes = float(arguments[0]), int(arguments[1]), int(arguments[2])
    _become_subreaper()
    for limit, value in ((resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_bytes)):
        with contextlib.suppress(ValueError, OSError):  # a system may allow less, or not know the limit
            resource.setrlimit(limit, (value, value))
    passed = [int(each) for each in os.environ.pop("MINIKV_PASS_FDS", "").split(",") if each]
    child = subprocess.Popen(arguments[5:], stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=passed)
    for each in passed:
        os.close(each)
    try:
        return _wait(child, time.monotonic() + wall_s)
    finally:
        kill_descendants(child)
        shutil.rmtree(arguments[3], ignore_errors=True)  # the grader does so as well, unless it was killed


def _wait(child: subprocess.Popen[bytes], until: float) -> int:
    while child.poll() is None:
        if time.monotonic() > until:
            return TIME_IS_UP
        if select.select([sys.stdin], [], [], 0.05)[0]:  # readable only when it was closed: the grader wants an end
            return TIME_IS_UP
    return child.returncode


def _become_subreaper() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(child: subprocess.Popen[bytes], patience_s: float = 10.0) -> None:
    """Kill every descendant of this process until none is left."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        found = descendants(os.getpid())
        if child.poll() is not None and not found:
            return
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def descendants(ancestor: int) -> list[int]:
    """All processes that come from ``ancestor``, and are not only waiting to be reaped."""
    parents = _parents()
    found, queue = [], [ancestor]
    while queue:
        parent = queue.pop()
        children = [process for process, its in parents.items() if its == parent]
        found += children
        queue += children
    return found


def _parents() -> dict[int, int]:
    """The parent of every process of this machine."""
    if not os.path.isdir("/proc/self"):
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        return {int(line.split()[0]): int(line.split()[1]) for line in listing.splitlines() if len(line.split()) == 2}
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return parents


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
