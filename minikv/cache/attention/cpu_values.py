"""Weights times values: the second half of paged attention on a CPU, for few and for many rows."""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc, var-annotated"

from __future__ import annotations

from numba import njit

from minikv.compiled.product import INLINE
from minikv.compiled.simd import add_product, lanes_of, load_at, number, prefetch_at, store_at


@njit(**INLINE)
def add_values(zero, weights, across, along, values, table, start, end, sums, rows):
    """sums += weights @ values over the positions start .. end - 1: three rows and four vectors at a time, then what is left.

    values [block, slot, head_dim], sums [row, head_dim]. The weight of token start + t for row r is weights[t * along + r * across]:
    few and many rows keep them in different orders.
    Twelve sums stay in registers through all the blocks, and each value, once loaded, is used three times.
    """
    n = lanes_of(zero)
    fours = len(sums[0]) // (4 * n) * 4 * n
    for d in range(0, fours, 4 * n):
        for r in range(0, rows - rows % 3, 3):
            _add_three_rows(zero, weights, across, along, values, table, start, end, sums, r, d)
        for r in range(rows - rows % 3, rows):
            _add_one_row(zero, weights, across, along, values, table, start, end, sums, r, d)
    for d in range(fours, len(sums[0]), n):
        for r in range(rows):
            _add_one_vector(zero, weights, across, along, values, table, start, end, sums, r, d)


@njit(**INLINE)
def _add_three_rows(zero, weights, across, along, values, table, start, end, sums, r, d):
    n, block_size = lanes_of(zero), values.shape[1]
    a0, a1 = load_at(zero, sums, r, d), load_at(zero, sums, r, d + n)
    a2, a3 = load_at(zero, sums, r, d + 2 * n), load_at(zero, sums, r, d + 3 * n)
    b0, b1 = load_at(zero, sums, r + 1, d), load_at(zero, sums, r + 1, d + n)
    b2, b3 = load_at(zero, sums, r + 1, d + 2 * n), load_at(zero, sums, r + 1, d + 3 * n)
    c0, c1 = load_at(zero, sums, r + 2, d), load_at(zero, sums, r + 2, d + n)
    c2, c3 = load_at(zero, sums, r + 2, d + 2 * n), load_at(zero, sums, r + 2, d + 3 * n)
    for position in range(start, end, block_size):
        block = values[table[position // block_size]]
        if r == 0 and d == 0:
            ask_for(values[table[min(position + block_size, end - 1) // block_size]])
        for t in range(min(block_size, end - position)):
            at = (position - start + t) * along + r * across
            x, y, z = number(weights, at), number(weights, at + across), number(weights, at + 2 * across)
            part = load_at(zero, block, t, d)
            a0, b0, c0 = add_product(a0, x, part), add_product(b0, y, part), add_product(c0, z, part)
            part = load_at(zero, block, t, d + n)
            a1, b1, c1 = add_product(a1, x, part), add_product(b1, y, part), add_product(c1, z, part)
            part = load_at(zero, block, t, d + 2 * n)
            a2, b2, c2 = add_product(a2, x, part), add_product(b2, y, part), add_product(c2, z, part)
            part = load_at(zero, block, t, d + 3 * n)
            a3, b3, c3 = add_product(a3, x, part), add_product(b3, y, part), add_product(c3, z, part)
    _store_four(sums, r, d, n, a0, a1, a2, a3)
    _store_four(sums, r + 1, d, n, b0, b1, b2, b3)
    _store_four(sums, r + 2, d, n, c0, c1, c2, c3)


@njit(**INLINE)
def _add_one_row(zero, weights, across, along, values, table, start, end, sums, r, d):
    n, block_size = lanes_of(zero), values.shape[1]
    a0, a1 = load_at(zero, sums, r, d), load_at(zero, sums, r, d + n)
    a2, a3 = load_at(zero, sums, r, d + 2 * n), load_at(zero, sums, r, d + 3 * n)
    for position in range(start, end, block_size):
        block = values[table[position // block_size]]
        if r == 0 and d == 0:
            ask_for(values[table[min(position + block_size, end - 1) // block_size]])
        for t in range(min(block_size, end - position)):
            x = number(weights, (position - start + t) * along + r * across)
            a0 = add_product(a0, x, load_at(zero, block, t, d))
            a1 = add_product(a1, x, load_at(zero, block, t, d + n))
            a2 = add_product(a2, x, load_at(zero, block, t, d + 2 * n))
            a3 = add_product(a3, x, load_at(zero, block, t, d + 3 * n))
    _store_four(sums, r, d, n, a0, a1, a2, a3)


@njit(**INLINE)
def _add_one_vector(zero, weights, across, along, values, table, start, end, sums, r, d):
    block_size, s = values.shape[1], load_at(zero, sums, r, d)
    for position in range(start, end, block_size):
        block = values[table[position // block_size]]
        for t in range(min(block_size, end - position)):
            s = add_product(s, number(weights, (position - start + t) * along + r * across), load_at(zero, block, t, d))
    store_at(sums, r, d, s)


@njit(**INLINE)
def _store_four(sums, r, d, n, a, b, c, e):
    store_at(sums, r, d, a)
    store_at(sums, r, d + n, b)
    store_at(sums, r, d + 2 * n, c)
    store_at(sums, r, d + 3 * n, e)


@njit(**INLINE)
def ask_for(piece):
    """Ask for the next block's piece while this one is worked on: it lies elsewhere, so the processor cannot guess it."""
    for slot in range(piece.shape[0]):
        for d in range(0, piece.shape[1], 64 // piece.itemsize):  # 64 bytes: a cache line
            prefetch_at(piece, slot, d)
