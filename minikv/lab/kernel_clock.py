"""A clock between the kernels of the compiled step.

The compiled step (``engine/compiled_step.py``) is one call from Python: a sequence of kernels, one row each, that all threads
walk through (``compiled/sequence.py``). A kernel that only looks at the clock can stand in that sequence too. So the
profile is one of real steps, with the caches as they are in real steps: before every kernel and behind the last one,
whoever comes first writes down the time. That costs some 50 ns a kernel.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cfunc, types

from minikv.compiled import sequence
from minikv.compiled.simd import take_ticket

# A row for each look at the clock: how many threads came, and a struct timespec.
CAME, SECONDS, NANOSECONDS, FIELDS = range(4)

Kernels = list[float]  # seconds of each kernel of one sequence, in its order


def clocked(run: Callable[[int, int, int], None], tell: Callable[[Kernels], None]) -> Callable[[int, int, int], None]:
    """``minikv.compiled.threads.run`` with a clock: after each sequence of kernels, ``tell`` gets their times.

    Other kernels run as they would without. Where the system has no ``clock_gettime``, nothing is told.
    """
    look = _look()

    def run_clocked(kernel: int, arguments: int, threads: int) -> None:
        if look is None or kernel != sequence.sequence():
            return run(kernel, arguments, threads)
        count, address = _numbers(arguments, 2)
        rows = _numbers(address, count * sequence.FIELDS).reshape(count, sequence.FIELDS)
        stamps, nothing = np.zeros((count + 1, FIELDS), np.int64), np.zeros(1, np.int64)
        mixed = np.zeros((2 * count + 1, sequence.FIELDS), np.int64)
        mixed[1::2] = rows
        mixed[::2, sequence.KERNEL], mixed[::2, sequence.DONE] = look, nothing.ctypes.data  # nobody waits for a clock
        mixed[::2, sequence.ARGUMENTS] = stamps.ctypes.data + np.arange(count + 1) * stamps.strides[0]
        changed = np.array((len(mixed), mixed.ctypes.data), np.int64)
        run(kernel, changed.ctypes.data, threads)
        tell((np.diff(stamps[:, SECONDS]) + 1e-9 * np.diff(stamps[:, NANOSECONDS])).tolist())
        return None

    return run_clocked


def _numbers(address: int, count: int) -> Any:
    """``count`` whole numbers at ``address``, as an array over that memory."""
    return np.ctypeslib.as_array((ctypes.c_int64 * int(count)).from_address(int(address)))


@functools.cache
def _look() -> int | None:
    """Address of the kernel that looks at the clock, or None."""
    try:
        clock_gettime = ctypes.CDLL(None).clock_gettime
        monotonic = time.CLOCK_MONOTONIC
    except (AttributeError, OSError, TypeError):
        return None
    clock_gettime.argtypes, clock_gettime.restype = [ctypes.c_int, ctypes.c_int64], ctypes.c_int

    def look(arguments):
        if take_ticket(arguments) == 0:  # those who come later have waited for nothing
            clock_gettime(monotonic, arguments + 8 * SECONDS)

    compiled = cfunc(types.void(types.int64))(look)
    _keep.append(compiled)
    return int(compiled.address or 0)


_keep: list[Any] = []  # compiled code lives as long as its object
