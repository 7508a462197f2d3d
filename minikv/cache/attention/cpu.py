"""Paged attention on a CPU, as fast as memory is: a compiled loop that walks the block table.

Decoding reads every K and V of a sequence once and does little with them, so the time is that of the reading. To
gather the blocks into one tensor first would read and write them once more: several times slower. Instead, one thread
takes one sequence and one KV head and goes through the table block by block, for all the query heads that share this
KV head (they find it in the nearest cache). Softmax needs all the scores before the first weight; the *online* softmax
of FlashAttention (arXiv 2205.14135) does without: it keeps the largest score met so far, and when a larger one turns
up, what was summed under the old one is scaled down.

A long piece of a prompt is another matter. Each K and V is used for hundreds of queries, so that arithmetic counts,
and gathering is small beside it: gather once, then torch's own attention with a mask.
"""

# What is compiled has no types to check: Numba infers them.
# mypy: disable-error-code="no-untyped-def, call-arg, no-untyped-call, misc"

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit, types
from torch import Tensor

from minikv.compiled import threads
from minikv.compiled.cfunction import REORDER, compiled_function
from minikv.compiled.exponential import exp2
from minikv.compiled.fused import rms_norm
from minikv.compiled.simd import (
    add,
    add_product,
    address_of,
    lanes_of,
    load,
    pointer_to,
    prefetch,
    store,
    take_ticket,
    ticket_done,
    total,
    totals,
    zeros,
)

if TYPE_CHECKING:
    from minikv.cache.paged import StepTensors

# Up to so many query tokens a sequence are attended in the loop, more by gathering. Measured: at 16 tokens the loop takes
# 0.5 (context 64) to 1.1 (context 1,000) of the time, at 32 tokens 0.7 to 1.2, at 64 tokens 1.0 to 1.4.
FEW_TOKENS = 16
# A step that reads fewer bytes of K and V per layer than this runs on one thread: below it, two are no faster.
ALONE_BYTES = 1 << 17
# Scores that are turned into weights at once: 256 or 512 are some 5 % faster than 128.
TILE = 256
# Numbers in a vector, at most: head_dim must be a multiple.
LANES = 16
LOWEST = float(np.finfo(np.float32).min)  # finite: -inf - -inf would be nan

# How many whole numbers the compiled loop takes (see ``_work``), and which of them are the same for all layers of a step.
FIELDS, STEP, DONE = 29, slice(10, 23), 28

INLINE: dict[str, Any] = {"fastmath": REORDER, "error_model": "numpy", "forceinline": True}


def attend(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, layer: int, step: StepTensors) -> Tensor:
    """Shapes and meaning: see the package's docstring. float32 or float64, on a CPU."""
    plan = _plans.of(step, pool)
    return plan.attend(q, k, v, layer)


def kernel(dtype: torch.dtype, head_dim: int) -> int:
    """Address of the compiled loop."""
    return compiled_function(_work, dtype, math.gcd(head_dim, LANES))


def step_arguments(step: StepTensors, pool: Tensor, pieces: np.ndarray) -> tuple[int, ...]:
    """The loop's arguments STEP; the caller keeps everything alive. A row of pieces: first, count, context, gathered or 0."""
    num_blocks, layers, _, kv_heads, block_size, head_dim = pool.shape
    return (
        pool.data_ptr(), num_blocks, layers, kv_heads, block_size, head_dim, len(pieces), pieces.ctypes.data,
        step.block_tables.data_ptr(), step.block_tables.shape[1], len(step.slots), step.slots.data_ptr(),
        min(step.max_query_tokens, FEW_TOKENS),
    )  # fmt: skip


def is_small(pool: Tensor, pieces: np.ndarray) -> bool:
    """Whether one thread is as fast as many."""
    return 2 * pool.shape[3] * pool.shape[5] * pool.element_size() * int(pieces[:, 2].sum()) < ALONE_BYTES


class _Plan:
    """What all layers of a step share: the arguments of the compiled loop, scratch and masks for the long pieces."""

    def __init__(self, step: StepTensors, pool: Tensor) -> None:
        if not pool.is_contiguous():
            raise ValueError(f"the pool must be contiguous; its strides are {pool.stride()} for the shape {tuple(pool.shape)}")
        self.step, self.pool = weakref.ref(step), weakref.ref(pool)
        kv_heads, head_dim = pool.shape[3], pool.shape[5]
        self.kv_shape, self.dtype = (len(step.slots), kv_heads, head_dim), pool.dtype
        self.kernel = kernel(pool.dtype, head_dim)
        self.long = [(first, count, context) for first, count, context in step.pieces if count > FEW_TOKENS]
        self.gathered = [pool.new_empty(2, kv_heads, context, head_dim) for _, _, context in self.long]
        self.masks = [_mask(count, context) for _, count, context in self.long]
        self.pieces = np.zeros((len(step.pieces), 4), np.int64)
        self.pieces[:, :3] = step.pieces
        self.pieces[self.pieces[:, 1] > FEW_TOKENS, 3] = [gathered.data_ptr() for gathered in self.gathered]
        self.small = is_small(pool, self.pieces)
        self.arguments = np.zeros(FIELDS, np.int64)
        self.arguments[STEP] = step_arguments(step, pool, self.pieces)
        self.address = self.arguments.ctypes.data

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        self._check(q, k, v)
        q, k, v = (_rows(t) for t in (q, k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.arguments[:10] = (
            0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
            q.stride(0), k.stride(0), v.stride(0), q.shape[1], layer,
        )  # fmt: skip
        threads.run(self.kernel, self.address, 1 if self.small else torch.get_num_threads())
        for (first, count, _), gathered, mask in zip(self.long, self.gathered, self.masks, strict=True):
            out[first : first + count] = attend_long(q[first : first + count], gathered[0], gathered[1], mask)
        return out

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Compiled code does not look where it reads: what does not belong to the step is refused here."""
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


def attend_long(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of many queries of one sequence: q [queries, heads, head_dim]; keys, values [kv_heads, context, head_dim].

    torch reads each KV head for all the query heads of its group, without repeating it in memory.
    """
    q, keys, values = q.transpose(0, 1)[None], keys[None], values[None]  # [1, heads, queries, head_dim], ...
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def _mask(count: int, context: int) -> Tensor | None:
    """True where a query sees a key, aligned at the bottom right: [count, context]; None when nothing came before."""
    if count == context:
        return None
    return torch.ones(count, context, dtype=torch.bool).tril(context - count)


def _work(arguments):
    """What each thread does: take the next sequence and KV head until none is left.

    ``arguments`` points to whole numbers; the pointer's type says which floats are meant.

        0         the ticket counter
        1 to 9    q, k, v, out; their tokens' distances, for q, k, v; query heads; the layer
        10 to 22  the step: see ``step_arguments``
        23 to 27  0, or q and k come as the product left them and are normalised and rotated first, where they are:
                  positions [tokens], cos and sin [position, head_dim], norm weights [heads + kv_heads, head_dim] or 0, eps [1]
        28        how many tickets are done
    """
    a = carray(pointer_to(address_of(arguments), types.int64), (FIELDS,))
    heads, kv_heads, block_size, head_dim, sequences = a[8], a[13], a[14], a[15], a[16]
    q = carray(pointer_to(a[1], arguments), (a[20], a[5]))  # a row is a token, with all of its heads and more
    k = carray(pointer_to(a[2], arguments), (a[20], a[6]))
    v = carray(pointer_to(a[3], arguments), (a[20], a[7]))
    out = carray(pointer_to(a[4], arguments), (a[20], heads * head_dim))
    pool = carray(pointer_to(a[10], arguments), (a[11], a[12], 2, kv_heads, block_size, head_dim))
    pieces = carray(pointer_to(a[17], types.int64), (sequences, 4))
    tables = carray(pointer_to(a[18], types.int32), (sequences, a[19]))
    slots = carray(pointer_to(a[21], types.int64), (a[20],))
    layer, group, zero = a[9], heads // kv_heads, zeros(arguments)
    rows = group * a[22]
    queries = np.empty((rows, head_dim), pool.dtype)
    sums = np.empty((rows, head_dim), pool.dtype)
    scores = np.empty((rows, max(TILE, block_size)), pool.dtype)
    state = np.empty((rows, 2), pool.dtype)
    while True:
        ticket = take_ticket(address_of(arguments))
        if ticket >= sequences * kv_heads:
            break
        s, h = ticket // kv_heads, ticket % kv_heads
        first, count, context, gathered = pieces[s]
        if a[23]:
            _turn(zero, arguments, a, q, k, h, group, first, count)
        _store(pool, layer, h, k, v, slots, first, count)
        if gathered:
            target = carray(pointer_to(gathered, arguments), (2, kv_heads, context, head_dim))
            _gather(pool, layer, h, tables[s], target[0, h], target[1, h])
        else:
            _attend(zero, q, out, pool, layer, h, tables[s], first, count, context, group, queries, sums, scores, state)
        ticket_done(address_of(arguments) + 8 * DONE)


@njit(**INLINE)
def _turn(zero, arguments, a, q, k, h, group, first, count):
    """Normalise (if the model does) and rotate the queries of KV head ``h`` and its key, where they are."""
    head_dim = a[15]
    positions = carray(pointer_to(a[23], types.int64), (a[20],))
    for token in range(first, first + count):
        cos = carray(pointer_to(a[24] + positions[token] * head_dim * q.itemsize, arguments), (head_dim,))
        sin = carray(pointer_to(a[25] + positions[token] * head_dim * q.itemsize, arguments), (head_dim,))
        for i in range(group + 1):
            head = h * group + i if i < group else h
            row = (q if i < group else k)[token, head * head_dim : (head + 1) * head_dim]
            if a[26]:
                weights = a[26] + (head if i < group else a[8] + h) * head_dim * q.itemsize
                weight = carray(pointer_to(weights, arguments), (head_dim,))
                rms_norm(zero, row, weight, carray(pointer_to(a[27], arguments), (1,))[0], row)
            half = head_dim // 2
            for d in range(half):  # (x, y) are half a head apart; sin is negative in its first half
                x, y = row[d], row[d + half]
                row[d] = x * cos[d] + y * sin[d]
                row[d + half] = y * cos[d + half] + x * sin[d + half]


@njit(**INLINE)
def _store(pool, layer, h, k, v, slots, first, count):
    """One head's K and V of ``count`` tokens into their slots."""
    block_size, head_dim = pool.shape[4], pool.shape[5]
    for token in range(first, first + count):
        block, slot = slots[token] // block_size, slots[token] % block_size
        for d in range(head_dim):
            pool[block, layer, 0, h, slot, d] = k[token, h * head_dim + d]
            pool[block, layer, 1, h, slot, d] = v[token, h * head_dim + d]


@njit(**INLINE)
def _gather(pool, layer, h, table, keys, values):
    """One head's K and V of a sequence from its blocks into keys, values [context, head_dim]."""
    block_size = pool.shape[4]
    for position in range(0, len(keys), block_size):
        block = table[position // block_size]
        for slot in range(min(block_size, len(keys) - position)):
            for d in range(keys.shape[1]):
                keys[position + slot, d] = pool[block, layer, 0, h, slot, d]
                values[position + slot, d] = pool[block, layer, 1, h, slot, d]


@njit(**INLINE)
def _attend(zero, q, out, pool, layer, h, table, first, count, context, group, queries, sums, scores, state):
    """Online softmax over one sequence for the query heads of KV head ``h``.

    Row r of queries, sums [rows, head_dim] and scores [rows, tile] is query token r // group with its head r % group;
    state[r] holds the largest score so far and the sum of the weights under it.
    """
    block_size, head_dim = pool.shape[4], pool.shape[5]
    rows = count * group
    scale = pool.dtype.type(1 / math.log(2) / math.sqrt(head_dim))  # weights are powers of 2, not of e: cheaper
    for r in range(rows):
        column = (h * group + r % group) * head_dim
        for d in range(head_dim):
            queries[r, d] = q[first + r // group, column + d] * scale
            sums[r, d] = 0
        state[r, 0], state[r, 1] = LOWEST, 0
    tile = max(TILE // block_size, 1) * block_size
    for start in range(0, context, tile):
        end = min(start + tile, context)
        for position in range(start, end, block_size):
            keys = pool[table[position // block_size], layer, 0, h]  # [slot, head_dim], one piece of memory
            tokens = min(block_size, end - position)
            _prefetch(pool[table[min(position + block_size, context - 1) // block_size], layer, 0, h])
            for r in range(rows):
                _score(zero, queries[r], keys, tokens, scores[r, position - start :])
        for r in range(rows):
            visible = min(end, context - count + 1 + r // group) - start
            _weigh(scores[r], visible, end - start, sums[r], state[r])
        for position in range(start, end, block_size):
            values = pool[table[position // block_size], layer, 1, h]
            tokens = min(block_size, end - position)
            _prefetch(pool[table[min(position + block_size, context - 1) // block_size], layer, 1, h])
            for r in range(rows):
                _add(zero, scores[r, position - start :], values, tokens, sums[r])
    for r in range(rows):
        column = (h * group + r % group) * head_dim
        for d in range(head_dim):
            out[first + r // group, column + d] = sums[r, d] / state[r, 1]


@njit(**INLINE)
def _prefetch(piece):
    """Ask for the next block's piece while this one is worked on: it lies elsewhere, so the processor cannot guess it.

    Measured on one thread: 1.04 (head_dim 64) to 1.16 (head_dim 32, pieces of 2 KB) times as fast with it.
    """
    for slot in range(piece.shape[0]):
        for d in range(0, piece.shape[1], 64 // piece.itemsize):  # 64 bytes: a cache line
            prefetch(piece[slot], d)


@njit(**INLINE)
def _score(zero, query, keys, tokens, scores):
    """scores[t] = query . keys[t], four tokens at a time: their sums are independent, and end in one vector."""
    even = tokens - tokens % 4
    for t in range(0, even, 4):
        s0 = s1 = s2 = s3 = zero
        for d in range(0, len(query), lanes_of(zero)):
            x = load(zero, query, d)
            s0 = add_product(s0, x, load(zero, keys[t], d))
            s1 = add_product(s1, x, load(zero, keys[t + 1], d))
            s2 = add_product(s2, x, load(zero, keys[t + 2], d))
            s3 = add_product(s3, x, load(zero, keys[t + 3], d))
        store(scores, t, totals(s0, s1, s2, s3))
    for t in range(even, tokens):
        s0 = zero
        for d in range(0, len(query), lanes_of(zero)):
            s0 = add_product(s0, load(zero, query, d), load(zero, keys[t], d))
        scores[t] = total(s0)


@njit(**INLINE)
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


@njit(fastmath=REORDER | {"nnan"}, forceinline=True)
def _largest(scores, tokens, largest):
    """Without ``nnan`` the maximum would be taken one by one; a nan among the scores still makes its weight a nan."""
    for t in range(tokens):
        largest = max(largest, scores[t])
    return largest


@njit(**INLINE)
def _add(zero, weights, values, tokens, sums):
    """sums += weights @ values, some lanes of all tokens after the other, so that the sums stay in registers."""
    even = tokens - tokens % 4
    for d in range(0, len(sums), lanes_of(zero)):
        s0, s1, s2, s3 = load(zero, sums, d), zero, zero, zero
        for t in range(0, even, 4):
            s0 = add_product(s0, weights[t], load(zero, values[t], d))
            s1 = add_product(s1, weights[t + 1], load(zero, values[t + 1], d))
            s2 = add_product(s2, weights[t + 2], load(zero, values[t + 2], d))
            s3 = add_product(s3, weights[t + 3], load(zero, values[t + 3], d))
        for t in range(even, tokens):
            s0 = add_product(s0, weights[t], load(zero, values[t], d))
        store(sums, d, add(add(s0, s1), add(s2, s3)))
