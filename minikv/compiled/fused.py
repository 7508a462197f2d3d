"""A product with what stands before and after it: norm, product, bias, SiLU, sum, in one call.

Between two products of a transformer stand small things: a norm, a bias, a gate, a sum. Each takes a microsecond of
arithmetic, but as an operation of its own ten, most of it for being called, and with many rows each goes through memory
once more. Here they ride along. A thread takes a ticket for some rows of x and some of the matrix, normalises the rows
(every thread for itself: sooner done than waited for), multiplies, and finishes the results while they are in the
nearest cache.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray, njit, types

from minikv.compiled.cfunction import compiled_function, lanes
from minikv.compiled.exponential import exp2
from minikv.compiled.product import CALLED, products
from minikv.compiled.simd import add_product, address_of, lanes_of, load, pointer_to, take_ticket, ticket_done, total, zeros

# What the arguments are, by their place. Addresses of tensors: X [rows, inputs]; WEIGHT [outputs, inputs], or twice as many
# rows when GATED; OUT [rows, outputs]; NORM [inputs] and BIAS [outputs], or 0 for none; EPS [1];
# PICKED [rows], which rows of X are meant, or 0 for the first ones (with a NORM only). TICKET is the next one, DONE counts the
# tickets done; they and ROWS, which every step sets, come first.
TICKET, DONE, ROWS, X, INPUTS, NORM, EPS, WEIGHT, BIAS, OUT, OUTPUTS, GATED, ADDS, PICKED, FIELDS = range(15)
OUTPUTS_A_TICKET, ROWS_A_TICKET = 32, 48


def fused_product(dtype: torch.dtype, inputs: int) -> int:
    """Address of the C function for rows of ``inputs`` numbers; its arguments are FIELDS whole numbers, as above.

    With p = norm(x) @ weight.T + bias, it computes out = p, or out += p when ADDS, or out = silu(gate) * up when GATED:
    gate is the first half of p's columns, up the second.
    """
    return compiled_function(_fused, dtype, lanes(dtype, inputs))


def tickets(rows: int, outputs: int) -> int:
    """How many tickets the product has."""
    return -(-rows // ROWS_A_TICKET) * -(-outputs // OUTPUTS_A_TICKET)


def _fused(arguments):
    """What each thread does: take the next few rows and outputs until none is left."""
    a = carray(pointer_to(address_of(arguments), types.int64), (FIELDS,))
    rows, inputs, outputs, parts = a[ROWS], a[INPUTS], a[OUTPUTS], 1 + a[GATED]
    weight = carray(pointer_to(a[WEIGHT], arguments), (parts * outputs, inputs))
    out = carray(pointer_to(a[OUT], arguments), (rows, outputs))
    zero = zeros(arguments)
    x, x_first = input_rows(arguments, a), -1
    results = np.empty((min(rows, ROWS_A_TICKET), parts * OUTPUTS_A_TICKET), out.dtype)  # of a gate, and of what it lets through behind it
    columns = -(-outputs // OUTPUTS_A_TICKET)
    while True:
        ticket = take_ticket(address_of(arguments))
        first_row, first = ticket // columns * ROWS_A_TICKET, ticket % columns * OUTPUTS_A_TICKET
        if first_row >= rows:
            break
        num_rows, count = min(ROWS_A_TICKET, rows - first_row), min(OUTPUTS_A_TICKET, outputs - first)
        if first_row != x_first:
            x, x_first = take_rows(zero, arguments, a, x, first_row, num_rows), first_row
        for part in range(parts):
            start = part * outputs + first
            products(zero, x, num_rows, weight, start, start + count, results, part * OUTPUTS_A_TICKET)
        if a[BIAS]:
            bias = carray(pointer_to(a[BIAS], arguments), (outputs,))
            for r in range(num_rows):
                _add(results[r], bias[first:], count)
        for r in range(num_rows):
            if a[GATED]:
                _gate(results[r], results[r, OUTPUTS_A_TICKET:], count)
            if a[ADDS]:
                _add(results[r], out[first_row + r, first:], count)
            for o in range(count):
                out[first_row + r, first + o] = results[r, o]
        ticket_done(address_of(arguments) + 8 * DONE)


@njit(**CALLED)
def input_rows(arguments, a):
    """Room for the rows of a ticket once they are normalised; without a norm, nothing."""
    return np.empty((min(a[ROWS], ROWS_A_TICKET) if a[NORM] else 0, a[INPUTS]), carray(pointer_to(a[X], arguments), (1,)).dtype)


@njit(**CALLED)
def take_rows(zero, arguments, a, room, first, count):
    """The rows from ``first`` on, normalised in ``room``, or without a norm where they are."""
    inputs = a[INPUTS]
    if not a[NORM]:
        return carray(pointer_to(a[X] + first * inputs * room.itemsize, arguments), (count, inputs))
    x = carray(pointer_to(a[X], arguments), (a[ROWS], inputs))
    norm = carray(pointer_to(a[NORM], arguments), (inputs,))
    eps = carray(pointer_to(a[EPS], arguments), (1,))[0]
    picked = carray(pointer_to(a[PICKED], types.int64), (a[ROWS],))
    for r in range(count):
        rms_norm(zero, x[picked[first + r] if a[PICKED] else first + r], norm, eps, room[r])
    return room


@njit(**CALLED)
def rms_norm(zero, x, weight, eps, out):
    """out = x / sqrt(mean(x ** 2) + eps) * weight; ``out`` may be ``x``."""
    squares = zero
    for i in range(0, len(x), lanes_of(zero)):
        part = load(zero, x, i)
        squares = add_product(squares, part, part)
    scale = x.dtype.type(1 / math.sqrt(total(squares) / len(x) + eps))
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@njit(**CALLED)
def _add(sums, x, count):
    for i in range(count):
        sums[i] += x[i]


@njit(**CALLED)
def _gate(gate, up, count):
    """gate = silu(gate) * up, where silu(g) = g / (1 + e ** -g); the power is taken of -|g|, so that it is never huge."""
    log2_e, one = gate.dtype.type(1 / math.log(2)), gate.dtype.type(1)
    for i in range(count):
        g = gate[i]
        power = exp2(-abs(g) * log2_e)
        gate[i] = g * ((one if g >= 0 else power) / (one + power)) * up[i]
