"""Scores of a few query rows, those of a token that decodes: as fast as the keys can be read.

A block's keys are one piece of memory, and the next block's lie elsewhere, so that the processor cannot guess what to read ahead.
It is asked to, and every tile asks for as much as it uses. To ask for a whole block at its beginning is to ask for more than the
processor can remember, and it stands still: 12 sequences of 950 tokens, two threads, 1.13 times as fast in small pieces.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc, var-annotated"

from __future__ import annotations

from numba import njit

from minikv.compiled.product import CALLED, FORCED
from minikv.compiled.simd import lanes_of, prefetch_at
from minikv.compiled.tile import add_rows_by_rows, no_sums, store_totals


@njit(**CALLED)
def scores_of_few(zero, queries, rows, keys, table, start, end, last, scores):
    """scores[r, t] = queries[r] . key of token start + t, up to ``end``; keys [block, slot, head_dim].

    ``last`` is the last token of all, up to which keys are asked for.
    """
    three, two, one, single = no_sums(zero, 3, 4), no_sums(zero, 2, 4), no_sums(zero, 1, 4), no_sums(zero, 1, 1)
    block_size = keys.shape[1]
    for position in range(start, end, block_size):
        block, tokens, at = keys[table[position // block_size]], min(block_size, end - position), position - start
        ahead = keys[table[min(position + block_size, last) // block_size]]
        for t in range(0, tokens - tokens % 4, 4):
            r = 0
            while rows - r > 4 or rows - r == 3:
                _scores(three, 4, queries, r, block, t, ahead, scores, at)
                r += 3
            while rows - r >= 2:
                _scores(two, 4, queries, r, block, t, ahead, scores, at)
                r += 2
            if r < rows:
                _scores(one, 4, queries, r, block, t, ahead, scores, at)
        for t in range(tokens - tokens % 4, tokens):
            for r in range(rows):
                _scores(single, 1, queries, r, block, t, ahead, scores, at)


@njit(**FORCED)
def _scores(sums, tokens, queries, r, block, t, ahead, scores, at):
    """Of as many rows and ``tokens`` as the tile ``sums`` has; the first rows' asks for as many tokens of the block ``ahead``."""
    n = lanes_of(sums)
    for i in range(0, block.shape[1], n):
        if r == 0:
            for part in range(0, tokens, 2):  # two vectors are a cache line, or less
                prefetch_at(ahead, t, tokens * i + part * n)
        sums = add_rows_by_rows(sums, queries, r, block, t, i)
    store_totals(scores, r, at + t, sums)
