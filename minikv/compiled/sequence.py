"""Kernel after kernel, on all threads, without going back to Python in between and without waiting for a thread.

Each kernel reads what the one before has written, so all of it must be done first. The usual answer is a barrier, where
every thread waits for every other; when some other program has one of the cores, that is a time slice of several
milliseconds at each barrier. Here nobody waits for threads, only for work: a kernel counts its finished tickets, and
whoever finds no ticket left waits until all that were taken are done. A thread that comes late finds everything done
and walks through; one that never comes is not missed.

A step that had 41 kernels, two threads, while another program keeps one of two cores busy: 264 ms when each kernel is a call of
its own, 12 to 24 ms so (the team is still gathered and dismissed once). On a quiet machine a call costs 3 to 6 us.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import torch
from numba import carray, types

from minikv.compiled.cfunction import compiled_function
from minikv.compiled.simd import address_of, call_kernel, pointer_to, tickets_done

# A row for each kernel: its address, that of its arguments, that of its count of finished tickets, how many there will be.
KERNEL, ARGUMENTS, DONE, TICKETS, FIELDS = range(5)


def sequence() -> int:
    """Address of the C function; its arguments are the number of kernels and the address of their rows."""
    return compiled_function(_sequence, torch.float64, 1)


def _sequence(arguments):
    """What each thread does."""
    a = carray(pointer_to(address_of(arguments), types.int64), (2,))
    rows = carray(pointer_to(a[1], types.int64), (a[0], FIELDS))
    for i in range(a[0]):
        call_kernel(rows[i, KERNEL], rows[i, ARGUMENTS])
        while tickets_done(rows[i, DONE]) < rows[i, TICKETS]:
            pass
