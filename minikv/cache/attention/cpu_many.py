"""Paged attention for many rows at once, a piece of a prompt: rows lie beside each other in a vector's lanes.

With few rows, a score is a sum over a vector's lanes, and adding them up costs as much as multiplying. With many, the
queries are turned over once, so that a lane is a row: the score of four tokens with 24 rows is 12 sums in registers, to
which each place of head_dim adds 12 products, and nothing is left to be added up. Largest score, weights and their sum are
then taken for all rows side by side, too.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc, var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from minikv.compiled.exponential import exp2
from minikv.compiled.product import CALLED, INLINE
from minikv.compiled.simd import add, add_product, lanes_of, larger, load, load_at, number_at, store, store_at

VECTORS = 3  # of rows in a tile of scores
LOWEST = float(np.finfo(np.float32).min)  # finite: -inf - -inf would be nan


@njit(**INLINE)
def scores_of_many(zero, queries, keys, tokens, scores):
    """scores[t, r] = keys[t] . queries[:, r]; queries [head_dim, row], keys [slot, head_dim], scores [token, row].

    There are rows up to a multiple of VECTORS vectors.
    """
    width = VECTORS * lanes_of(zero)
    for r in range(0, queries.shape[1], width):
        if tokens >= 4:
            for t in range(0, tokens, 4):
                _four_tokens(zero, queries, r, keys, min(t, tokens - 4), scores)  # the last ones may overlap
        else:
            for t in range(tokens):
                _one_token(zero, queries, r, keys, t, scores)


@njit(**INLINE)
def _four_tokens(zero, queries, r, keys, t, scores):
    n = lanes_of(zero)
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = d0 = d1 = d2 = zero
    for i in range(len(queries)):
        x, y, z = load_at(zero, queries, i, r), load_at(zero, queries, i, r + n), load_at(zero, queries, i, r + 2 * n)
        key = number_at(keys, t, i)
        a0, a1, a2 = add_product(a0, key, x), add_product(a1, key, y), add_product(a2, key, z)
        key = number_at(keys, t + 1, i)
        b0, b1, b2 = add_product(b0, key, x), add_product(b1, key, y), add_product(b2, key, z)
        key = number_at(keys, t + 2, i)
        c0, c1, c2 = add_product(c0, key, x), add_product(c1, key, y), add_product(c2, key, z)
        key = number_at(keys, t + 3, i)
        d0, d1, d2 = add_product(d0, key, x), add_product(d1, key, y), add_product(d2, key, z)
    _store_three(scores, t, r, n, a0, a1, a2)
    _store_three(scores, t + 1, r, n, b0, b1, b2)
    _store_three(scores, t + 2, r, n, c0, c1, c2)
    _store_three(scores, t + 3, r, n, d0, d1, d2)


@njit(**INLINE)
def _one_token(zero, queries, r, keys, t, scores):
    n = lanes_of(zero)
    a0 = a1 = a2 = zero
    for i in range(len(queries)):
        key = number_at(keys, t, i)
        a0 = add_product(a0, key, load_at(zero, queries, i, r))
        a1 = add_product(a1, key, load_at(zero, queries, i, r + n))
        a2 = add_product(a2, key, load_at(zero, queries, i, r + 2 * n))
    _store_three(scores, t, r, n, a0, a1, a2)


@njit(**INLINE)
def _store_three(scores, t, r, n, a, b, c):
    store_at(scores, t, r, a)
    store_at(scores, t, r + n, b)
    store_at(scores, t, r + 2 * n, c)


@njit(**INLINE)
def weigh_many(zero, scores, first, group, sums, largest, totals, before):
    """Scores become weights under the largest score so far; what was summed before is scaled to it.

    Token t is the future of the rows before (first + t) * group. largest, totals and before [row]: the largest score so far,
    the sum of the weights under it, and room.
    """
    rows, n, future = len(sums), lanes_of(zero), max(1 - first, 0)  # tokens before ``future`` are nobody's future
    for t in range(future, len(scores)):
        _fill(scores[t], min((first + t) * group, rows), LOWEST)
    for r in range(0, scores.shape[1], n):
        most = load(zero, largest, r)
        store(before, r, most)
        for t in range(len(scores)):
            most = larger(load_at(zero, scores, t, r), most)
        store(largest, r, most)
    for r in range(rows):
        shrink = exp2(before[r] - largest[r])
        totals[r] *= shrink
        _scale(sums[r], shrink)
    for t in range(len(scores)):
        _take_weights(scores[t], largest)
    for t in range(future, len(scores)):
        _fill(scores[t], min((first + t) * group, rows), 0)
    for r in range(0, scores.shape[1], n):
        total = load(zero, totals, r)
        for t in range(len(scores)):
            total = add(total, load_at(zero, scores, t, r))
        store(totals, r, total)


@njit(**CALLED)
def _fill(row, count, value):
    for r in range(count):
        row[r] = value


@njit(**CALLED)
def _take_weights(scores, largest):
    for r in range(len(scores)):
        scores[r] = exp2(scores[r] - largest[r])


@njit(**CALLED)
def _scale(row, factor):
    for d in range(len(row)):
        row[d] *= factor
