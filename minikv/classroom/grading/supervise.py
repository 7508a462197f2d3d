"""python supervise.py WALL_S FILE_BYTES MEMORY_BYTES FOLDER -- COMMAND: run it within limits, and leave nothing of it.

It ends when the command does, when the time is up, or when its own stdin is closed: so it goes with the grader, however that
ends. Then every process that came from the command is killed, also one that has made itself a session of its own or whose
parent is gone: on Linux those fall to this process (a "subreaper"). FOLDER, the scratch folder, is removed. Nothing of minikv
is imported, so that it starts quickly.

A submission may kill this process as well. Then its processes fall to the grader, which is a subreaper too, and looks for
``strays``: those that carry the mark of the run in their environment, or live in its folder.
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
from collections.abc import Callable, Iterator

TIME_IS_UP = 124
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
MARK = "MINIKV_RUN"
"""The environment variable by which the processes of one run are known."""
_own: set[int] | None = None
"""The children that the grader had before it began, while it adopts those of others."""


def main(arguments: list[str]) -> int:
    """The command's exit status, or ``TIME_IS_UP``."""
    wall_s, file_bytes, memory_bytes = float(arguments[0]), int(arguments[1]), int(arguments[2])
    control_process(PR_SET_CHILD_SUBREAPER, 1)
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
        kill(lambda: descendants(os.getpid()))
        shutil.rmtree(arguments[3], ignore_errors=True)  # the grader does so as well, unless it was killed


def _wait(child: subprocess.Popen[bytes], until: float) -> int:
    while child.poll() is None:
        if time.monotonic() > until:
            return TIME_IS_UP
        if select.select([sys.stdin], [], [], 0.05)[0]:  # readable only when it was closed: the grader wants an end
            return TIME_IS_UP
    return child.returncode


def control_process(option: int, value: int) -> None:
    """prctl(2) on this process, where there is such a thing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@contextlib.contextmanager
def hardened() -> Iterator[None]:
    """What the grader makes of itself while it grades: its memory and its open files are closed to other processes of the same
    user (root aside), and what loses its parent falls to it."""
    global _own
    _own = set(descendants(os.getpid()))
    control_process(PR_SET_DUMPABLE, 0)
    control_process(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        control_process(PR_SET_CHILD_SUBREAPER, 0)
        control_process(PR_SET_DUMPABLE, 1)
        _own = None


def kill(find: Callable[[], list[int]], patience_s: float = 10.0) -> None:
    """Kill what ``find`` finds until it finds nothing: processes may start others meanwhile."""
    until = time.monotonic() + patience_s
    while (found := find()) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        for process in found:  # those that are, or become, our own children wait for us
            with contextlib.suppress(OSError):
                os.waitpid(process, os.WNOHANG)
        time.sleep(0.01)


def descendants(ancestor: int) -> list[int]:
    """All processes that come from ``ancestor``, also those that wait to be reaped."""
    parents = _parents()
    found, queue = [], [ancestor]
    while queue:
        parent = queue.pop()
        children = [process for process, its in parents.items() if its == parent]
        found += children
        queue += children
    return found


def strays(mark: str, folder: str) -> list[int]:
    """Processes of a run whose supervisor is gone: with its ``mark``, or with a working directory below its ``folder``."""
    wanted = f"{MARK}={mark}".encode()
    return [process for process in _parents() if process != os.getpid() and _belongs(process, wanted, folder)]


def _belongs(process: int, wanted: bytes, folder: str) -> bool:
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{process}/cwd").startswith(folder):  # "... (deleted)" follows when the folder is gone
            return True
    with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
        return wanted in file.read().split(b"\0")
    return False


def orphans() -> list[int]:
    """Children of this process in a session that is not its own, and what comes from them: they have lost their supervisor.

    A supervisor shares the session of the grader, and what it starts has one of its own.
    """
    if _own is None:
        return []
    found = []
    for process, parent in _parents().items():
        with contextlib.suppress(OSError):
            if parent == os.getpid() and process not in _own and os.getsid(process) != os.getsid(0):
                found += [process, *descendants(process)]
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
