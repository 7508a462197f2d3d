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
from minikv.compiled.product import CALLED, FORCED
from minikv.compiled.simd import add, lanes_of, larger, load, load_at, store
from minikv.compiled.tile import add_numbers_by_row, no_sums, store_tile

VECTORS = 3  # of rows in a tile of scores
LOWEST = float(np.finfo(np.float32).min)  # finite: -inf - -inf would be nan


@njit(**CALLED)
def scores_of_many(zero, queries, keys, table, start, end, scores):
    """scores[t, r] = key of token start + t . queries[:, r], up to ``end``; queries [head_dim, row], keys [block, slot, head_dim].

    There are rows up to a multiple of VECTORS vectors.
    """
    four, one, block_size = no_sums(zero, 4, VECTORS), no_sums(zero, 1, VECTORS), keys.shape[1]
    for position in range(start, end, block_size):
        block, tokens, at = keys[table[position // block_size]], min(block_size, end - position), position - start
        for r in range(0, queries.shape[1], VECTORS * lanes_of(zero)):
            for t in range(0, tokens - tokens % 4, 4):
                _scores(four, queries, r, block, t, scores, at)
            for t in range(tokens - tokens % 4, tokens):
                _scores(one, queries, r, block, t, scores, at)


@njit(**FORCED)
def _scores(sums, queries, r, keys, t, scores, at):
    """Of as many tokens of a block as the tile ``sums`` has rows."""
    head_dim = len(queries)
    for d in range(head_dim):
        sums = add_numbers_by_row(sums, keys, t * head_dim + d, head_dim, queries, d, r)
    store_tile(scores, at + t, r, sums)


@njit(**CALLED)
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
