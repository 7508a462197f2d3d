"""Compile a Python function into a plain C function of one argument, once, and keep it.

The argument is the address of an array of whole numbers: sizes and the addresses of tensors. Its type in the compiled
code, pointer to a vector, carries what must be known at compile time: float32 or float64, and how many of them are
worked on at once.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types
from numba.core.caching import FunctionCache

from minikv.compiled.simd import Vector

# What the compiler may change about sums: their order, nothing about infinities. (With all of fastmath, it may assume that
# there are none, and a score of -inf would make a nan.)
REORDER = {"reassoc", "contract", "arcp", "nsz"}

VECTOR_BYTES = 32
"""A vector's size: one register of AVX2, two of ARM's NEON. With twice as much, a tile of sums fills more registers than there are."""

_keep: list[Any] = []  # compiled code lives as long as its object


def _sources() -> str:
    """Eight letters that change when any source file with compiled code does."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), *sorted((Path(__file__).parents[1] / "cache" / "attention").glob("cpu*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


SOURCES = _sources()  # as they are when they are imported: a file that is edited afterwards is not what gets compiled


def lanes(dtype: torch.dtype, numbers: int) -> int:
    """How many numbers a vector has where rows are ``numbers`` long: as many as fit that divide the length."""
    return math.gcd(numbers, VECTOR_BYTES // dtype.itemsize)


@functools.cache
def compiled_function(function: Callable[..., Any], dtype: torch.dtype, lanes: int) -> int:
    """Address of ``function`` compiled for ``dtype`` (float32 or float64) in vectors of ``lanes`` numbers.

    Compiled in a few seconds the first time and kept on disk, where that is possible.
    """
    function.__qualname__ = _kept_as(function)
    number = {torch.float32: types.float32, torch.float64: types.float64}[dtype]
    signature = types.void(types.CPointer(Vector(number, lanes)))
    options: dict[str, Any] = {"fastmath": REORDER, "error_model": "numpy"}
    try:
        compiled = cfunc(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # neither the package's folder nor the user's cache can be written
        compiled = cfunc(signature, **options)(function)
    _keep.append(compiled)
    return int(compiled.address or 0)


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether ``function`` was compiled before, for some dtype at least; True also where nothing can be kept."""
    function.__qualname__ = _kept_as(function)
    try:
        folder = Path(FunctionCache(function).cache_path)
    except (RuntimeError, OSError):
        return True
    return any(folder.glob(f"*.{function.__qualname__}-*.nbi"))


def _kept_as(function: Callable[..., Any]) -> str:
    """The name under which Numba keeps what it compiled.

    It looks only at the file of ``function`` to see whether that is out of date, and not at the files that it uses; so the name
    says what is in all of them.
    """
    return f"{function.__name__}_{SOURCES}"
