"""Run a compiled kernel on the threads that torch already has.

Two pools of threads on the same cores fight: workers that have finished spin for a while, waiting for more, and slow
down the other pool's work by up to four times. Numba's parallel loops would be such a second pool. So a kernel here is
a plain C function ``void kernel(void *arguments)``, and every thread of a team calls it with the same arguments; which
piece of work a thread does next is decided by a ticket counter among the arguments, not by the thread's number.

The team is torch's own. torch's CPU loops run on an OpenMP library, and that library's entry point for "call this
function on n threads" can be called from anywhere: ``GOMP_parallel`` (the name is part of the ABI that GCC's and
LLVM's runtimes share). Where torch was built without it, a few Python threads do the same, a little slower.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # calls through it release Python's lock


def run(kernel: int, arguments: int, threads: int) -> None:
    """Call the C function at address ``kernel`` with the address ``arguments`` on ``threads`` threads; wait for all.

    Ask for 1 or for ``torch.get_num_threads()``: OpenMP ends the threads that a smaller team leaves over, and
    starting them again costs 100 us.
    """
    if threads == 1:
        _function(kernel)(arguments)
    else:
        _team()(kernel, arguments, threads)


@functools.cache
def _function(kernel: int) -> Callable[[int], None]:
    return KERNEL(kernel)


@functools.cache
def _team() -> Callable[[int, int, int], None]:
    parallel = _openmp_parallel()
    if parallel is None:
        return _run_on_python_threads
    return lambda kernel, arguments, threads: parallel(kernel, arguments, threads, 0)


def _openmp_parallel() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel`` of the very library that torch is linked to, or None.

    A symbol that is looked up in a loaded library is looked up in the libraries that it depends on too, so that the
    OpenMP library need not be found by its name and no second copy is loaded.
    """
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    try:
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _run_on_python_threads(kernel: int, arguments: int, threads: int) -> None:
    function = _function(kernel)
    others = [_helpers().submit(function, arguments) for _ in range(threads - 1)]
    try:
        function(arguments)
    finally:
        for other in others:
            if not other.cancel():  # a helper that has not even started is not needed: all tickets are taken
                other.result()


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="minikv")
