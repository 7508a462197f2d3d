"""Paged attention on a CPU, as fast as memory and arithmetic are: a compiled loop that walks the block table.

Decoding reads every K and V of a sequence once and does little with them, so the time is that of the reading. To
gather the blocks into one tensor first would read and write them once more: several times slower. Instead, one thread
takes a *tile*, some queries of one sequence with all the query heads that share a KV head, and goes through the table
block by block. Softmax needs all the scores before the first weight; the *online* softmax of FlashAttention
(arXiv 2205.14135) does without: it keeps the largest score met so far, and when a larger one turns up, what was summed
under the old one is scaled down.

A chunk of a prompt is no other matter: it is cut into tiles, and a tile of many rows uses each K and V, once it is in the
nearest cache, for all of them. A tile ends at the last token that its queries see, so that most of the future is never
touched.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc, var-annotated"

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from minikv.cache.attention.cpu_few import scores_of_few
from minikv.cache.attention.cpu_many import LOWEST, VECTORS, scores_of_many, weigh_many
from minikv.cache.attention.cpu_values import add_values
from minikv.compiled import threads
from minikv.compiled.cfunction import REORDER, compiled_function, is_kept, lanes
from minikv.compiled.exponential import exp2
from minikv.compiled.product import CALLED, INLINE
from minikv.compiled.simd import (
    address_of,
    lanes_of,
    pointer_to,
    start_of,
    take_ticket,
    ticket_done,
    zeros,
)

if TYPE_CHECKING:
    from minikv.cache.paged import StepTensors

# A tile has at most so many rows, query tokens x query heads of a group: as many as the nearest caches hold with their scores.
ROWS_A_TILE = 48
# So many rows are taken in the lanes of vectors, fewer one by one.
MANY_ROWS = 16
# Tokens whose scores are turned into weights at once: with more, their values do not stay in the nearest cache.
TOKENS_A_TILE = 128
# A step that reads fewer bytes of K and V per layer than this runs on one thread: below it, two are no faster.
ALONE_BYTES = 1 << 17

# What the compiled loop takes, by its place. Addresses: Q, whose tokens lie Q_DISTANCE numbers apart; OUT [tokens, HEADS, head_dim];
# POOL [BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM]; TILE_ROWS [TILES, 4], see ``tiles_of``, of sequences with up to MOST_TOKENS
# each; TABLES [sequences, WIDTH] int32. TICKET is the next one, DONE counts the tickets done. Those of STEP are the same for all layers.
(
    TICKET, DONE, Q, Q_DISTANCE, OUT, HEADS, LAYER,
    POOL, BLOCKS, LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILES, TILE_ROWS, TABLES, WIDTH, MOST_TOKENS, FIELDS,
) = range(19)  # fmt: skip
STEP = slice(POOL, FIELDS)


def attend(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, layer: int, step: StepTensors) -> Tensor:
    """Shapes and meaning: see the package's docstring. float32 or float64, on a CPU."""
    plan = _plans.of(step, pool)
    return plan.attend(q, k, v, layer)


def kernel(dtype: torch.dtype, head_dim: int) -> int:
    """Address of the compiled loop."""
    return compiled_function(_work, dtype, lanes(dtype, head_dim))


def kernel_is_kept() -> bool:
    """Whether the loop was compiled before."""
    return is_kept(_work)


def tiles_of(pieces: list[tuple[int, int, int]], group: int) -> np.ndarray:
    """The step's work as rows (first token, tokens, context, sequence), int64, that of most work first.

    ``pieces`` are (first token, tokens, context length); a tile's context ends at its own last token.
    """
    most = max(1, ROWS_A_TILE // group)
    rows = []
    for sequence, (first, count, context) in enumerate(pieces):
        for start in range(0, count, most):
            tokens = min(most, count - start)
            rows.append((first + start, tokens, context - count + start + tokens, sequence))
    rows.sort(key=lambda tile: -tile[1] * tile[2])
    return np.array(rows, np.int64)


def step_arguments(step: StepTensors, pool: Tensor, tiles: np.ndarray) -> tuple[int, ...]:
    """The loop's arguments STEP; the caller keeps everything alive."""
    num_blocks, layers, _, kv_heads, block_size, head_dim = pool.shape
    return (
        pool.data_ptr(), num_blocks, layers, kv_heads, block_size, head_dim, len(tiles), tiles.ctypes.data,
        step.address("block_tables"), step.width, step.max_query_tokens,
    )  # fmt: skip


def is_small(pool: Tensor, tiles: np.ndarray) -> bool:
    """Whether one thread is as fast as many."""
    return 2 * pool.shape[3] * pool.shape[5] * pool.element_size() * int((tiles[:, 1] * tiles[:, 2]).sum()) < ALONE_BYTES


class _Plan:
    """What all layers of a step share: the arguments of the compiled loops."""

    def __init__(self, step: StepTensors, pool: Tensor) -> None:
        if not pool.is_contiguous():
            raise ValueError(f"the pool must be contiguous; its strides are {pool.stride()} for the shape {tuple(pool.shape)}")
        self.step, self.pool = weakref.ref(step), weakref.ref(pool)
        blocks = max(int(step.slots.max()) // pool.shape[4], int(step.block_tables.max())) + 1
        if blocks > len(pool) or not step.pieces:
            raise ValueError(f"the step has {len(step.pieces)} sequences in blocks up to {blocks}, the pool {len(pool)} blocks")
        self.layers = pool.shape[1]
        self.kv_shape, self.dtype = (len(step.slots), pool.shape[3], pool.shape[5]), pool.dtype
        self.kernel = kernel(pool.dtype, pool.shape[5])
        self.store = compiled_function(_store, pool.dtype, 1)
        self.slots = step.slots
        num_blocks, layers, _, kv_heads, block_size, head_dim = pool.shape
        self.to_store = np.array(
            (0, 0, 0, 0, 0, len(step.slots), step.slots.data_ptr(), pool.data_ptr(), num_blocks, layers, kv_heads, block_size, head_dim),
            np.int64,
        )
        self.arguments: np.ndarray | None = None

    def _count(self, group: int) -> np.ndarray:
        """The loop's arguments; how many query heads share a KV head is known once there are queries."""
        step, pool = self.step(), self.pool()
        assert step is not None
        assert pool is not None
        self.tiles = tiles_of(step.pieces, group)
        self.small = is_small(pool, self.tiles)
        arguments = np.zeros(FIELDS, np.int64)
        arguments[STEP] = step_arguments(step, pool, self.tiles)
        return arguments

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        self._check(q, k, v, layer)
        if self.arguments is None:
            self.arguments = self._count(q.shape[1] // self.kv_shape[1])
        q, k, v = (_rows(t) for t in (q, k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.to_store[:5] = k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), layer
        threads.run(self.store, self.to_store.ctypes.data, 1)
        self.arguments[:POOL] = (0, 0, q.data_ptr(), q.stride(0), out.data_ptr(), q.shape[1], layer)
        threads.run(self.kernel, self.arguments.ctypes.data, 1 if self.small else torch.get_num_threads())
        return out

    def _check(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> None:
        """Compiled code does not look where it reads: what does not belong to the step is refused here."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"there is no layer {layer} in a pool of {self.layers}")
        tokens, kv_heads, head_dim = self.kv_shape
        queries = q.shape[0] == tokens and q.shape[1] % kv_heads == 0 and q.shape[2] == head_dim
        if not (queries and k.shape == v.shape == self.kv_shape and q.dtype == k.dtype == v.dtype == self.dtype):
            raise ValueError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not belong to a step of {tokens} tokens with "
                f"{kv_heads} KV heads of {head_dim} in {self.dtype}"
            )


def _rows(t: Tensor) -> Tensor:
    """``t`` [tokens, heads, head_dim] with each token's numbers behind each other; tokens may lie apart (no copy)."""
    return t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous()


class _Plans(threading.local):
    """The last step's plan of each thread: all its layers come one after the other."""

    plan: _Plan | None = None

    def of(self, step: StepTensors, pool: Tensor) -> _Plan:
        if self.plan is None or self.plan.step() is not step or self.plan.pool() is not pool:
            self.plan = _Plan(step, pool)
        return self.plan


_plans = _Plans()


def _work(arguments):
    """What each thread does: take the next tile and KV head until none is left."""
    a = carray(pointer_to(address_of(arguments), types.int64), (FIELDS,))
    heads, kv_heads, block_size, head_dim, num_tiles = a[HEADS], a[KV_HEADS], a[BLOCK_SIZE], a[HEAD_DIM], a[TILES]
    layer, group, zero = a[LAYER], heads // kv_heads, zeros(arguments)
    pool = carray(pointer_to(a[POOL], arguments), (a[BLOCKS], a[LAYERS], 2, kv_heads, block_size, head_dim))
    tiles = carray(pointer_to(a[TILE_ROWS], types.int64), (num_tiles, 4))
    rows, width = min(group * a[MOST_TOKENS], max(group, ROWS_A_TILE)), VECTORS * lanes_of(zero)
    wide = -(-rows // width) * width
    tile = max(TOKENS_A_TILE // block_size, 1) * block_size
    queries = np.zeros(head_dim * wide, pool.dtype)  # also those of the lanes that no row has: what they score, nobody reads
    scores = np.empty(tile * wide, pool.dtype)
    sums, state = np.empty((rows, head_dim), pool.dtype), np.empty((3, wide), pool.dtype)
    while True:
        ticket = take_ticket(address_of(arguments))
        if ticket >= num_tiles * kv_heads:
            break
        first, count, context, sequence = tiles[ticket // kv_heads]
        h = ticket % kv_heads
        table = carray(pointer_to(a[TABLES] + 4 * sequence * a[WIDTH], types.int32), (a[WIDTH],))
        distance = a[Q_DISTANCE]
        q = carray(pointer_to(a[Q] + first * distance * pool.itemsize, arguments), (count, distance))  # a token, its heads and more
        out = carray(pointer_to(a[OUT] + first * heads * head_dim * pool.itemsize, arguments), (count, heads * head_dim))
        keys, values = pool[:, layer, 0, h], pool[:, layer, 1, h]  # [block, slot, head_dim]: a block's are one piece of memory
        _begin(sums, state)
        _attend(zero, arguments, q, h, group, keys, values, table, context, queries, scores, tile, wide, sums, state)
        _finish(sums, state[1], h, group, out)
        ticket_done(address_of(arguments) + 8 * DONE)


def _store(arguments):
    """K and V of a step's tokens into their slots; one thread, for the time is small."""
    a = carray(pointer_to(address_of(arguments), types.int64), (13,))
    tokens, kv_heads, head_dim = a[5], a[10], a[12]
    k, v = carray(pointer_to(a[0], arguments), (tokens, a[2])), carray(pointer_to(a[1], arguments), (tokens, a[3]))
    slots = carray(pointer_to(a[6], types.int64), (tokens,))
    pool = carray(pointer_to(a[7], arguments), (a[8], a[9], 2, kv_heads, a[11], head_dim))
    for token in range(tokens):
        for h in range(kv_heads):
            store_row(pool, slots[token], a[4], 0, h, k[token, h * head_dim :])
            store_row(pool, slots[token], a[4], 1, h, v[token, h * head_dim :])


@njit(**CALLED)
def store_row(pool, slot, layer, which, h, row):
    """One head's K (``which`` 0) or V (1) of one token into its slot."""
    block, place = slot // pool.shape[4], slot % pool.shape[4]
    for d in range(pool.shape[5]):
        pool[block, layer, which, h, place, d] = row[d]


@njit(**CALLED)
def _begin(sums, state):
    """Nothing is summed yet; the largest score so far is the lowest number."""
    for r in range(len(sums)):
        for d in range(sums.shape[1]):
            sums[r, d] = 0
    for r in range(state.shape[1]):
        state[0, r], state[1, r] = LOWEST, 0


@njit(**INLINE)
def _attend(zero, arguments, q, h, group, keys, values, table, context, queries, scores, tile, wide, sums, state):
    """Online softmax over the first ``context`` tokens of one sequence, for the query heads of KV head ``h``.

    Row r is query token r // group of ``q`` with head r % group, and sees before + r // group + 1 tokens. queries and scores
    are room for ``wide`` rows, and for ``tile`` tokens; with few rows a row's numbers lie behind each other, with many a
    token's do. sums [row, head_dim]; state[:, row]: the largest score so far, the sum of the weights under it.
    """
    head_dim = keys.shape[2]
    rows, before = len(q) * group, context - len(q)
    many = rows >= MANY_ROWS
    row_queries = carray(pointer_to(start_of(queries), arguments), (rows, head_dim))
    row_scores = carray(pointer_to(start_of(scores), arguments), (rows, tile))
    lane_queries = carray(pointer_to(start_of(queries), arguments), (head_dim, wide))
    lane_scores = carray(pointer_to(start_of(scores), arguments), (tile, wide))
    _take_queries(q, h, group, head_dim, queries, 1 if many else head_dim, wide if many else 1)
    for start in range(0, context, tile):
        end = min(start + tile, context)
        if many:
            scores_of_many(zero, lane_queries, keys, table, start, end, lane_scores)
            weigh_many(zero, lane_scores[: end - start], start - before, group, sums[:rows], state[0], state[1], state[2])
        else:
            scores_of_few(zero, row_queries, rows, keys, table, start, end, context - 1, row_scores)
            for r in range(rows):
                _weigh(row_scores[r], min(end, before + r // group + 1) - start, end - start, sums[r], state[:, r])
        add_values(zero, scores, 1 if many else tile, wide if many else 1, values, table, start, end, sums, rows)


@njit(**CALLED)
def _take_queries(q, h, group, head_dim, queries, across, along):
    """The queries of a tile's rows: number d of row r at place r * across + d * along."""
    scale = queries.dtype.type(1 / math.log(2) / math.sqrt(head_dim))  # weights are powers of 2, not of e: cheaper
    for r in range(len(q) * group):
        column = (h * group + r % group) * head_dim
        for d in range(head_dim):
            queries[r * across + d * along] = q[r // group, column + d] * scale


@njit(**CALLED)
def _finish(sums, totals, h, group, out):
    head_dim = sums.shape[1]
    for r in range(len(out) * group):
        column = (h * group + r % group) * head_dim
        for d in range(head_dim):
            out[r // group, column + d] = sums[r, d] / totals[r]


@njit(**CALLED)
def _weigh(scores, visible, tokens, sums, state):
    """Scores become weights under the largest score so far; what was summed before is scaled to it."""
    largest = _largest(scores, visible, state[0])
    if largest > state[0]:
        shrink = exp2(state[0] - largest)
        for d in range(len(sums)):
            sums[d] *= shrink
        state[0], state[1] = largest, state[1] * shrink
    total = state[1]
    for t in range(visible):
        weight = exp2(scores[t] - largest)
        scores[t] = weight
        total += weight
    state[1] = total
    for t in range(max(visible, 0), tokens):  # the future
        scores[t] = 0


@njit(**CALLED | {"fastmath": REORDER | {"nnan"}})
def _largest(scores, tokens, largest):
    """Without ``nnan`` the maximum would be taken one by one; a nan among the scores still makes its weight a nan."""
    for t in range(tokens):
        largest = max(largest, scores[t])
    return largest
