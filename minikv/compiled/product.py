"""Rows times a large matrix: at the speed of memory when there are few, at that of arithmetic when there are many.

Decoding one sequence multiplies one row with every weight of the model. Each weight is used once, so the time is that
of reading them, and all cores are needed to read at full speed: the matrix's rows are dealt out to them. With a
hundred rows each weight, once read, is used a hundred times, and the time is that of the multiplications. Then what
counts is that the processor never waits for a number: a tile of 3 rows x 4 outputs keeps its twelve sums in registers and
uses every number that it loads three or four times.

No copy of the weights in another order is needed: both operands have the numbers that belong together behind each other.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc, var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from minikv.compiled import threads
from minikv.compiled.cfunction import REORDER, compiled_function, lanes
from minikv.compiled.simd import address_of, lanes_of, pointer_to, prefetch_at, take_ticket, zeros
from minikv.compiled.tile import add_columns, add_rows_by_row, add_rows_by_rows, no_sums, store_totals

OUTPUTS_A_TICKET = 64
ALONE_NUMBERS = 1 << 15  # a smaller matrix is done by one thread: waking the others takes longer
FEW, PAGE = 4, 4096  # so few rows, with less than a page of inputs: the matrix is read row by row
ROWS_NEARBY = 48  # so many rows are multiplied with all outputs of a ticket before the next ones: they stay in a near cache

# How a function becomes part of a kernel. What is compiled first and then called, or put into its caller by LLVM, is compiled
# once more with every caller, so it had better be small: CALLED are loops that the compiler turns into vectors by itself, FORCED is
# a tile's innermost loop, which must not cost a call. INLINE is put into its caller by Numba before types are known: for what is long.
# Nothing of it is called from Python; without the wrappers for that, there is less to compile.
CALLED: dict[str, Any] = {"fastmath": REORDER, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
INLINE: dict[str, Any] = {**CALLED, "inline": "always"}
FORCED: dict[str, Any] = {**CALLED, "forceinline": True}


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T; x [rows, inputs], weight [outputs, inputs], contiguous, on a CPU, float32 or float64, no gradients.

    Returns [rows, outputs]. ValueError when the sizes do not fit: compiled code does not look where it reads.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not weight.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} and a contiguous weight {tuple(weight.shape)} of as many inputs are wanted")
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    kernel = compiled_function(_work, x.dtype, lanes(x.dtype, inputs))
    arguments = np.array((0, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, outputs, inputs), np.int64)
    threads.run(kernel, arguments.ctypes.data, 1 if rows * weight.numel() < ALONE_NUMBERS else torch.get_num_threads())
    return out


def _work(arguments):
    """What each thread does: take the next few rows of the matrix until none is left."""
    a = carray(pointer_to(address_of(arguments), types.int64), (7,))
    x = carray(pointer_to(a[1], arguments), (a[4], a[6]))
    weight = carray(pointer_to(a[2], arguments), (a[5], a[6]))
    out = carray(pointer_to(a[3], arguments), (a[4], a[5]))
    while True:
        first = take_ticket(address_of(arguments)) * OUTPUTS_A_TICKET
        if first >= len(weight):
            break
        products(zeros(arguments), x, len(x), weight, first, min(first + OUTPUTS_A_TICKET, len(weight)), out, first)


@njit(**INLINE)
def products(zero, x, rows, weight, first, last, out, column):
    """out[r, column + o] = x[r] . weight[first + o] for r below ``rows`` and o below last - first.

    The arrays are not cut to size by whoever calls: cutting is dear to compile.

    A processor reads ahead by itself, but only within a page of memory and after some cache lines in order. Rows shorter than a
    page, several of them at once, are too short for it. So few rows of x take the matrix row by row, and for more the next
    rows are asked for. 57 MB in rows of 384 numbers, two threads: 1 row of x 26 GB/s instead of 22, 3 rows 27 instead of 20; 6 and
    12 rows 1.3 and 1.4 times as fast, 32 rows 1.2 times. With rows of 1,024 numbers neither gains anything.
    """
    short = weight.shape[1] * x.itemsize < PAGE
    if short and rows <= FEW:
        _row_by_row(zero, x, rows, weight, first, last, out, column)
    else:
        _in_tiles(zero, x, rows, weight, first, last, out, column, 4 if short else 0)


@njit(**INLINE)
def _in_tiles(zero, x, rows, weight, first, last, out, column, ahead):
    """As ``products``, in tiles of 3 rows x 4 outputs, the last ones smaller.

    The rows of the matrix that are asked for are ``ahead`` of those that are read (0: the same).
    """
    three, two, one, single = no_sums(zero, 3, 4), no_sums(zero, 2, 4), no_sums(zero, 1, 4), no_sums(zero, 1, 1)
    fours = last - (last - first) % 4
    for start in range(0, rows, ROWS_NEARBY):
        end = min(start + ROWS_NEARBY, rows)
        for o in range(first, fours, 4):
            r = start
            while end - r > 4 or end - r == 3:
                _tile(three, x, r, weight, o, out, column + o - first, ahead)
                r += 3
            while end - r >= 2:
                _tile(two, x, r, weight, o, out, column + o - first, ahead)
                r += 2
            if r < end:
                _tile(one, x, r, weight, o, out, column + o - first, ahead)
    for o in range(fours, last):
        for r in range(rows):
            _tile(single, x, r, weight, o, out, column + o - first, 0)


@njit(**FORCED)
def _tile(sums, x, r, weight, o, out, column, ahead):
    """out[r + i, column + j] = x[r + i] . weight[o + j], for as many rows and outputs as the tile ``sums`` has.

    Of the four rows of the matrix that are ``ahead``, every tile asks for two, in the order in which they lie in memory.
    """
    inputs = weight.shape[1]
    half = r // 3 % 2 * 2 * inputs
    for i in range(0, inputs, lanes_of(sums)):
        prefetch_at(weight, o + ahead, half + 2 * i)
        sums = add_rows_by_rows(sums, x, r, weight, o, i)
    store_totals(out, r, column, sums)


@njit(**INLINE)
def _row_by_row(zero, x, rows, weight, first, last, out, column):
    """As ``products``, one output after the other: the matrix is read in the order in which it lies in memory."""
    for o in range(first, last):
        r = 0
        while rows - r >= 3:
            _one_output(no_sums(zero, 3, 4), no_sums(zero, 3, 1), x, r, weight, o, out, column + o - first)
            r += 3
        while r < rows:
            _one_output(no_sums(zero, 1, 4), no_sums(zero, 1, 1), x, r, weight, o, out, column + o - first)
            r += 1


@njit(**FORCED)
def _one_output(parts, rest, x, r, weight, o, out, column):
    """out[r + i, column] = x[r + i] . weight[o], four vectors at a time, for as many rows as the tiles have."""
    inputs, n = weight.shape[1], lanes_of(parts)
    fours = inputs - inputs % (4 * n)
    for i in range(0, fours, 4 * n):
        parts = add_rows_by_row(parts, x, r, weight, o, i)
    for i in range(fours, inputs, n):
        rest = add_rows_by_row(rest, x, r, weight, o, i)
    store_totals(out, r, column, add_columns(rest, parts))
