"""Weights times values: the second half of paged attention on a CPU, for few and for many rows."""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc, var-annotated"

from __future__ import annotations

from numba import njit

from minikv.compiled.product import FORCED, INLINE
from minikv.compiled.simd import lanes_of, prefetch_at
from minikv.compiled.tile import add_numbers_by_row, no_sums, store_tile, tile_at


@njit(**INLINE)
def add_values(zero, weights, across, along, values, table, start, end, sums, rows):
    """sums += weights @ values over the positions start .. end - 1: three rows and four vectors at a time, then what is left.

    values [block, slot, head_dim], sums [row, head_dim]. The weight of token start + t for row r is weights[t * along + r * across]:
    few and many rows keep them in different orders.
    Twelve sums stay in registers through all the blocks, and each value, once loaded, is used three times.
    """
    three, one, single = no_sums(zero, 3, 4), no_sums(zero, 1, 4), no_sums(zero, 1, 1)
    n, head_dim, threes = lanes_of(zero), sums.shape[1], rows - rows % 3
    fours = head_dim - head_dim % (4 * n)
    for d in range(0, fours, 4 * n):
        for r in range(0, threes, 3):
            _add_values(three, weights, across, along, values, table, start, end, sums, r, d)
        for r in range(threes, rows):
            _add_values(one, weights, across, along, values, table, start, end, sums, r, d)
    for d in range(fours, head_dim, n):
        for r in range(rows):
            _add_values(single, weights, across, along, values, table, start, end, sums, r, d)


@njit(**FORCED)
def _add_values(like, weights, across, along, values, table, start, end, sums, r, d):
    """For as many rows and places of head_dim as a tile like ``like`` has; each asks for as much of the next block."""
    block_size, n = values.shape[1], lanes_of(like)
    tile = tile_at(like, sums, r, d)
    for position in range(start, end, block_size):
        block = values[table[position // block_size]]
        ahead = values[table[min(position + block_size, end - 1) // block_size]]
        for t in range(min(block_size, end - position)):
            prefetch_at(ahead, t, d)
            prefetch_at(ahead, t, d + 2 * n)
            tile = add_numbers_by_row(tile, weights, (position - start + t) * along + r * across, across, block, t, d)
    store_tile(sums, r, d, tile)
