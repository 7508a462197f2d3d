"""Compile one kernel in a process of its own while this one compiles others.

Numba compiles one function at a time, and the kernels of a step take 16 s together, half of it for attention's. What is
compiled is kept on disk, so another process can do that half; the first token on a machine that has never run minikv then comes
after 13 to 17 s instead of 17 to 20 (three fresh starts each, in turn, two cores). Should it fail, for whatever reason, the kernel is
compiled here, as if nothing had been tried; one that does not end is waited for, but not for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PROGRAM = """
import importlib, sys, torch
module, kernel, dtype, inputs = sys.argv[1:]
getattr(importlib.import_module(module), kernel)(getattr(torch, dtype), int(inputs))
"""
MOST_SECONDS = 120  # that it is waited for, on the slowest machine


@contextmanager
def compiling(kernel: Callable[[torch.dtype, int], int], dtype: torch.dtype, inputs: int, kept: bool) -> Iterator[None]:
    """Compile ``kernel(dtype, inputs)`` elsewhere, from the beginning of the block to its end; not if it is ``kept`` already."""
    arguments = (kernel.__module__, kernel.__name__, str(dtype).removeprefix("torch."), str(inputs))
    if kept or not sys.executable or hasattr(sys, "frozen") or torch.get_num_threads() == 1:  # frozen: no Python that takes a program
        yield
        return
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str))  # Python passes over others, too
    environment, nothing = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, subprocess.DEVNULL
    command = [sys.executable, "-P", "-c", PROGRAM, *arguments]  # -P: what lies in the current folder is not imported
    try:
        child = subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing)
    except (OSError, ValueError):  # no process may be started here, or not with such a path
        yield
        return
    try:
        yield
        child.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also of whoever is interrupted
        child.kill()
        child.wait()
