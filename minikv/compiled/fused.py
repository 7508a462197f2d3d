"""A product of few rows with what stands before and after it: norm, product, bias, SiLU, sum, in one call.

Between two products of a transformer stand small things: a norm, a bias, a gate, a sum. Each takes a microsecond of
arithmetic, but as an operation of its own ten, most of it for being called. Here they ride along. Every thread
normalises the few rows for itself (sooner done than waited for), takes a ticket for some of the matrix's rows,
multiplies, and finishes the results while they are in the nearest cache.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray, njit, types

from minikv.compiled.cfunction import REORDER, compiled_function
from minikv.compiled.exponential import exp2
from minikv.compiled.product import LANES, _products
from minikv.compiled.simd import add_product, address_of, lanes_of, load, pointer_to, take_ticket, ticket_done, total, zeros

# What the arguments are, by their place. Addresses of tensors: X [rows, inputs]; WEIGHT [outputs, inputs], or twice as many
# rows when GATED; OUT [rows, outputs]; NORM [inputs] and BIAS [outputs], or 0 for none; EPS [1];
# PICKED [rows], which rows of X are meant, or 0 for the first ones (with a NORM only). DONE counts the tickets done.
TICKET, X, ROWS, INPUTS, NORM, EPS, WEIGHT, BIAS, OUT, OUTPUTS, GATED, ADDS, DONE, PICKED, FIELDS = range(15)
OUTPUTS_A_TICKET = 32


def fused_product(dtype: torch.dtype, inputs: int) -> int:
    """Address of the C function for rows of ``inputs`` numbers; its arguments are FIELDS whole numbers, as above.

    With p = norm(x) @ weight.T + bias, it computes out = p, or out += p when ADDS, or out = silu(gate) * up when GATED:
    gate is the first half of p's columns, up the second.
    """
    return compiled_function(_fused, dtype, math.gcd(inputs, LANES))


def _fused(arguments):
    """What each thread does: normalise, then take the next few outputs until none is left."""
    a = carray(pointer_to(address_of(arguments), types.int64), (FIELDS,))
    rows, inputs, outputs, parts = a[ROWS], a[INPUTS], a[OUTPUTS], 1 + a[GATED]
    x = carray(pointer_to(a[X], arguments), (rows, inputs))
    weight = carray(pointer_to(a[WEIGHT], arguments), (parts * outputs, inputs))
    out = carray(pointer_to(a[OUT], arguments), (rows, outputs))
    zero = zeros(arguments)
    if a[NORM]:
        norm = carray(pointer_to(a[NORM], arguments), (inputs,))
        eps = carray(pointer_to(a[EPS], arguments), (1,))[0]
        picked = carray(pointer_to(a[PICKED], types.int64), (rows,))
        normed = np.empty((rows, inputs), x.dtype)
        for r in range(rows):
            rms_norm(zero, x[picked[r] if a[PICKED] else r], norm, eps, normed[r])
        x = normed
    results = np.empty((2, rows, OUTPUTS_A_TICKET), x.dtype)  # gate and up, or only the first
    while True:
        first = take_ticket(address_of(arguments)) * OUTPUTS_A_TICKET
        if first >= outputs:
            break
        count = min(OUTPUTS_A_TICKET, outputs - first)
        for part in range(parts):
            _products(zero, x, weight[part * outputs + first :], results[part], 0, count)
        if a[BIAS]:
            bias = carray(pointer_to(a[BIAS], arguments), (outputs,))
            for r in range(rows):
                _add(bias[first:], results[0, r], count)
        for r in range(rows):
            if a[GATED]:
                _gate(results[0, r], results[1, r], count)
            if a[ADDS]:
                _add(out[r, first:], results[0, r], count)
            for o in range(count):
                out[r, first + o] = results[0, r, o]
        ticket_done(address_of(arguments) + 8 * DONE)


@njit(fastmath=REORDER, error_model="numpy", forceinline=True)
def rms_norm(zero, x, weight, eps, out):
    """out = x / sqrt(mean(x ** 2) + eps) * weight; ``out`` may be ``x``."""
    squares = zero
    for i in range(0, len(x), lanes_of(zero)):
        part = load(zero, x, i)
        squares = add_product(squares, part, part)
    scale = x.dtype.type(1 / math.sqrt(total(squares) / len(x) + eps))
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@njit(fastmath=REORDER, error_model="numpy", forceinline=True)
def _add(x, out, count):
    for i in range(count):
        out[i] += x[i]


@njit(fastmath=REORDER, error_model="numpy", forceinline=True)
def _gate(gate, up, count):
    """gate = silu(gate) * up, where silu(g) = g / (1 + e ** -g); the power is taken of -|g|, so that it is never huge."""
    log2_e, one = gate.dtype.type(1 / math.log(2)), gate.dtype.type(1)
    for i in range(count):
        g = gate[i]
        power = exp2(-abs(g) * log2_e)
        gate[i] = g * ((one if g >= 0 else power) / (one + power)) * up[i]
