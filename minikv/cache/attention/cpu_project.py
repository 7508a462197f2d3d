"""From the running sum to queries and stored K and V, in one compiled loop: norm, product, bias, q/k norm, rotation, slots.

A ticket is some tokens and one head, of Q, of K or of V. While its numbers are still in the nearest cache they are turned
by their positions, and K and V go straight into the blocks: nothing is written down only to be read and moved again.
When the loop is done, every K and V of the step is in its slot, so that attention may take its queries in any order.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit, types

from minikv.cache.attention.cpu import store_row
from minikv.compiled import fused
from minikv.compiled.cfunction import compiled_function, lanes
from minikv.compiled.fused import ROWS_A_TICKET, input_rows, rms_norm, take_rows
from minikv.compiled.product import CALLED, products
from minikv.compiled.simd import address_of, pointer_to, take_ticket, ticket_done, zeros

# What the loop takes beyond the fields of ``fused``, by its place. Addresses: POSITIONS, SLOTS [tokens]; COS, SIN
# [position, head_dim]; QK_NORM [heads + kv_heads, head_dim] or 0; POOL [blocks, layers, 2, kv_heads, block_size, head_dim]. Those
# from POSITIONS on are the same for all layers of a step.
HEADS, KV_HEADS, HEAD_DIM, COS, SIN, QK_NORM, LAYER, LAYERS, POSITIONS, SLOTS, POOL, BLOCKS, BLOCK_SIZE, FIELDS = range(
    fused.FIELDS, fused.FIELDS + 14
)


def projection(dtype: torch.dtype, inputs: int, head_dim: int) -> int:
    """Address of the C function; its arguments are FIELDS whole numbers. OUT gets the queries, [tokens, heads head_dim]."""
    return compiled_function(_project, dtype, min(lanes(dtype, inputs), lanes(dtype, head_dim)))


def tickets(tokens: int, heads: int) -> int:
    """How many tickets there are for ``heads`` of Q, K and V together."""
    return -(-tokens // ROWS_A_TICKET) * heads


def _project(arguments):
    """What each thread does: take the next few tokens and head until none is left."""
    a = carray(pointer_to(address_of(arguments), types.int64), (FIELDS,))
    tokens, heads, kv_heads, head_dim = a[fused.ROWS], a[HEADS], a[KV_HEADS], a[HEAD_DIM]
    columns = heads + 2 * kv_heads
    weight = carray(pointer_to(a[fused.WEIGHT], arguments), (columns * head_dim, a[fused.INPUTS]))
    bias = carray(pointer_to(a[fused.BIAS], arguments), (columns * head_dim,))
    q = carray(pointer_to(a[fused.OUT], arguments), (tokens, heads * head_dim))
    slots = carray(pointer_to(a[SLOTS], types.int64), (tokens,))
    pool = carray(pointer_to(a[POOL], arguments), (a[BLOCKS], a[LAYERS], 2, kv_heads, a[BLOCK_SIZE], head_dim))
    zero = zeros(arguments)
    x, x_first = input_rows(arguments, a), -1
    results = np.empty((min(tokens, ROWS_A_TICKET), head_dim), q.dtype)
    while True:
        ticket = take_ticket(address_of(arguments))
        first, head = ticket // columns * ROWS_A_TICKET, ticket % columns
        if first >= tokens:
            break
        count = min(ROWS_A_TICKET, tokens - first)
        if first != x_first:
            x, x_first = take_rows(zero, arguments, a, x, first, count), first
        products(zero, x, count, weight, head * head_dim, (head + 1) * head_dim, results, 0)
        for token in range(first, first + count):
            row = results[token - first]
            if a[fused.BIAS]:
                for d in range(head_dim):
                    row[d] += bias[head * head_dim + d]
            if head < heads + kv_heads:
                _turn(zero, arguments, a, row, head, token)
            if head < heads:
                for d in range(head_dim):
                    q[token, head * head_dim + d] = row[d]
            else:
                store_row(pool, slots[token], a[LAYER], (head - heads) // kv_heads, (head - heads) % kv_heads, row)
        ticket_done(address_of(arguments) + 8 * fused.DONE)


@njit(**CALLED)
def _turn(zero, arguments, a, row, head, token):
    """Normalise one head of one token, if the model does, and rotate it by its position, where it is."""
    head_dim, half = len(row), len(row) // 2
    positions = carray(pointer_to(a[POSITIONS], types.int64), (a[fused.ROWS],))
    cos = carray(pointer_to(a[COS] + positions[token] * head_dim * row.itemsize, arguments), (head_dim,))
    sin = carray(pointer_to(a[SIN] + positions[token] * head_dim * row.itemsize, arguments), (head_dim,))
    if a[QK_NORM]:
        weight = carray(pointer_to(a[QK_NORM] + head * head_dim * row.itemsize, arguments), (head_dim,))
        rms_norm(zero, row, weight, carray(pointer_to(a[fused.EPS], arguments), (1,))[0], row)
    for d in range(half):  # (x, y) are half a head apart; sin is negative in its first half
        x, y = row[d], row[d + half]
        row[d] = x * cos[d] + y * sin[d]
        row[d + half] = y * cos[d + half] + x * sin[d + half]
