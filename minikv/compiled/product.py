"""Rows times a large matrix: at the speed of memory when there are few, at that of arithmetic when there are many.

Decoding one sequence multiplies one row with every weight of the model. Each weight is used once, so the time is that
of reading them, and all cores are needed to read at full speed: the matrix's rows are dealt out to them. With a
hundred rows each weight, once read, is used a hundred times, and the time is that of the multiplications. Then what
counts is that the processor never waits for a number: a tile of 3 rows x 4 outputs keeps its twelve sums in registers and
uses every number that it loads three or four times.

No copy of the weights in another order is needed: both operands have the numbers that belong together behind each other.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from minikv.compiled import threads
from minikv.compiled.cfunction import REORDER, compiled_function, lanes
from minikv.compiled.simd import (
    add_product,
    address_of,
    lanes_of,
    load_at,
    pointer_to,
    store_at,
    take_ticket,
    total,
    totals,
    zeros,
)

OUTPUTS_A_TICKET = 64
ALONE_NUMBERS = 1 << 15  # a smaller matrix is done by one thread: waking the others takes longer
ROWS_NEARBY = 48  # so many rows are multiplied with all outputs of a ticket before the next ones: they stay in a near cache

# CALLED is for loops that the compiler turns into vectors by itself, INLINE for what is spelled out in vectors: it is inlined before
# types are known and so compiled once. Inlined by LLVM, it would be compiled anew at every level of calls: attention took 42 s, 19 s so.
CALLED: dict[str, Any] = {"fastmath": REORDER, "error_model": "numpy"}
INLINE: dict[str, Any] = {**CALLED, "inline": "always"}


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
        products(zeros(arguments), x, weight, out, first, min(first + OUTPUTS_A_TICKET, len(weight)))


@njit(**INLINE)
def products(zero, x, weight, out, first, last):
    """out[r, o] = x[r] . weight[o] for o in first .. last - 1, in tiles of 3 rows x 4 outputs; one or two rows go one by one.

    To ask for the next rows of the matrix meanwhile was measured and left out: the processor runs ahead well enough.
    """
    fours = last - (last - first) % 4
    for start in range(0, len(x), ROWS_NEARBY):
        for o in range(first, fours, 4):
            if len(x) < 3:
                for r in range(len(x)):
                    _one_row(zero, x, r, weight, o, out)
            else:
                for r in range(start, min(start + ROWS_NEARBY, len(x)), 3):
                    _three_rows(zero, x, min(r, len(x) - 3), weight, o, out)  # the last ones may overlap
    for o in range(fours, last):
        for r in range(len(x)):
            s = zero
            for i in range(0, weight.shape[1], lanes_of(zero)):
                s = add_product(s, load_at(zero, x, r, i), load_at(zero, weight, o, i))
            out[r, o] = total(s)


@njit(**INLINE)
def _one_row(zero, x, r, weight, o, out):
    """out[r, o : o + 4]; the four sums are independent."""
    s0 = s1 = s2 = s3 = zero
    for i in range(0, weight.shape[1], lanes_of(zero)):
        part = load_at(zero, x, r, i)
        s0 = add_product(s0, part, load_at(zero, weight, o, i))
        s1 = add_product(s1, part, load_at(zero, weight, o + 1, i))
        s2 = add_product(s2, part, load_at(zero, weight, o + 2, i))
        s3 = add_product(s3, part, load_at(zero, weight, o + 3, i))
    store_at(out, r, o, totals(s0, s1, s2, s3))


@njit(**INLINE)
def _three_rows(zero, x, r, weight, o, out):
    """out[r : r + 3, o : o + 4]. In this order a processor's 16 registers suffice: 12 sums, 3 parts of x, one of the matrix.

    One thread, 480 rows x 384 inputs: 78 to 80 GFLOP/s, where BLAS reaches 79 to 88; with the parts of the matrix in
    registers and x passing by, the compiler spills, and it is 42.
    """
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = zero
    for i in range(0, weight.shape[1], lanes_of(zero)):
        a, b, c = load_at(zero, x, r, i), load_at(zero, x, r + 1, i), load_at(zero, x, r + 2, i)
        part = load_at(zero, weight, o, i)
        a0, b0, c0 = add_product(a0, a, part), add_product(b0, b, part), add_product(c0, c, part)
        part = load_at(zero, weight, o + 1, i)
        a1, b1, c1 = add_product(a1, a, part), add_product(b1, b, part), add_product(c1, c, part)
        part = load_at(zero, weight, o + 2, i)
        a2, b2, c2 = add_product(a2, a, part), add_product(b2, b, part), add_product(c2, c, part)
        part = load_at(zero, weight, o + 3, i)
        a3, b3, c3 = add_product(a3, a, part), add_product(b3, b, part), add_product(c3, c, part)
    store_at(out, r, o, totals(a0, a1, a2, a3))
    store_at(out, r + 1, o, totals(b0, b1, b2, b3))
    store_at(out, r + 2, o, totals(c0, c1, c2, c3))
