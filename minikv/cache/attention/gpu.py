"""Paged attention on a GPU, in Triton: the loop of the CPU kernel, a tile of tokens at a time.

Triton code is written for one *program*, which works on tiles of numbers; thousands of programs run side by side. Three
things decide how fast the pool is read, and each shapes the code:

    who works      one program takes one sequence and one KV head, with all the query heads of its group, so that K and V
                   are read once for all of them. When few sequences decode, that would leave most of the card idle:
                   several programs then share one long context, and a second, small kernel joins what they found
                   (flash-decoding).
    what waits     the block table is looked up for a tile of positions at once, so that the reads of a tile are all
                   under way together, wherever its blocks lie; ``num_stages`` starts the next tile's before this one is done.
    who multiplies ``tl.dot`` runs on the matrix units, which take at least 16 rows: a small group is padded to 16.
                   The padding costs nothing, because decoding waits for memory, not for arithmetic.

The softmax is the online one of FlashAttention (arXiv 2205.14135), always in float32. A chunk of a prompt is a tile of
its tokens times the heads of a group, and walks through what was cached before it and then through itself.
Nothing here asks the device for a number: a step can be captured as a CUDA graph.
"""

# Triton reads these functions as text: it infers the types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from minikv.cache.paged import StepTensors

LEAST = 16  # rows, columns and depth that tl.dot takes at the least
MOST_SPLITS = 32  # programs that share one context
INTERPRETED = bool(triton.knobs.runtime.interpret)  # as it was when Triton was first imported
WIDEN = tl.constexpr(INTERPRETED)  # Triton 3.7's interpreter multiplies bfloat16 bit patterns as if they were whole numbers


def attend(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, layer: int, step: StepTensors) -> Tensor:
    """Shapes and meaning: see the package's docstring. float32, bfloat16 or float16, on a CUDA device.

    With TRITON_INTERPRET=1 it runs on a CPU as well, very slowly, for tests. ValueError for tensors that do not belong
    to the pool.
    """
    _, _, _, kv_heads, block_size, head_dim = pool.shape
    tokens, heads, _ = q.shape
    if not (pool.is_contiguous() and k.shape == v.shape == (tokens, kv_heads, head_dim) == (len(step.slots), kv_heads, q.shape[2])):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not belong to the pool {tuple(pool.shape)}")
    q, k, v = (_rows(t) for t in (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sequences, chunks, group = len(step.context_lengths), len(step.chunks), heads // kv_heads
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "BLOCK": block_size, "D": head_dim, "WIDE": _power_of_2(head_dim)}
    where = (pool, layer, pool.stride(0), step.block_tables, step.block_tables.stride(0), step.query_starts, step.context_lengths)
    rows, warps, tile, stages = _sizes_for(pool.dtype, pool.device, sizes["WIDE"])
    # A kernel of its own, because every program of the next ones may read what it stores.
    width = _power_of_2(kv_heads * head_dim)
    _store[(tokens,)](k, v, k.stride(0), v.stride(0), step.slots, pool, layer, pool.stride(0), **sizes, ALL=width)
    if chunks:
        rows = max(rows, _power_of_2(group))
        grid = (-(-step.max_query_tokens // (rows // group)), kv_heads, chunks)
        options = {"ROWS": rows, "TILE": tile, "num_warps": warps, "num_stages": stages}
        _prefill[grid](q, q.stride(0), out, *where, step.chunks, **sizes, **options)
    if chunks < sequences:
        splits = _splits(sequences * kv_heads, step.max_context_tokens, tile, pool.device)
        options = {"ROWS": _power_of_2(group), "TILE": tile, "num_warps": 4, "num_stages": stages}
        if splits == 1:
            _decode[(sequences, kv_heads, 1)](q, q.stride(0), out, *where, out, out, **sizes, **options, SPLIT=False)
        else:
            sums = torch.empty(sequences, heads, splits, head_dim, dtype=torch.float32, device=q.device)
            state = torch.empty(sequences, heads, splits, 2, dtype=torch.float32, device=q.device)
            _decode[(sequences, kv_heads, splits)](q, q.stride(0), out, *where, sums, state, **sizes, **options, SPLIT=True)
            _join[(sequences, heads)](sums, state, out, step.query_starts, splits, heads, head_dim, sizes["WIDE"], MOST_SPLITS)
    return out


def _rows(t: Tensor) -> Tensor:
    """``t`` [tokens, heads, head_dim] with each token's numbers behind each other; tokens may lie apart (no copy)."""
    return t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous()


def _power_of_2(size: int) -> int:
    """Tiles have sizes that are powers of 2, and tl.dot wants 16 at least; the rest is masked."""
    return max(LEAST, triton.next_power_of_2(size))


def _splits(programs: int, context: int, tile: int, device: torch.device) -> int:
    """How many programs share one context: enough for four a multiprocessor, with two tiles' work each.

    ``context`` is the largest of the step, known on the host. The grid must not depend on the others: in a captured
    graph it cannot change. A short context leaves its last programs with nothing to do.
    """
    wanted = min(4 * _multiprocessors(device) // programs, -(-context // (2 * tile)), MOST_SPLITS)
    return triton.next_power_of_2(wanted) if wanted > 1 else 1


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@lru_cache
def _sizes_for(dtype: torch.dtype, device: torch.device, wide: int) -> tuple[int, int, int, int]:
    """Query rows of a chunk's program, its warps, positions a tile, and tiles under way: what fits in shared memory.

    One tile of K and V takes 2 x positions x head_dim numbers, at most 32 KiB here. Data-centre cards (8.0, 9.0, 10.0) have
    room for three and 128 rows of q beside them; other cards have 99 KiB.
    """
    if device.type != "cuda":
        return 32, 4, 16, 1
    roomy = torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))
    tile = max(LEAST, min(64, 2**14 // (wide * dtype.itemsize)))
    if dtype == torch.float32:  # no matrix units: each product is spelled out, and large tiles take long to compile
        return LEAST, 4, LEAST, 2
    if wide > 128:
        return 32, 4, tile, 2
    return (128, 8, tile, 3) if roomy else (64, 4, tile, 2)


# ---------------------------------------------------------------- what runs on the device
# HEADS, KV_HEADS, BLOCK (slots a block) and D (head_dim) are known when a kernel is compiled; WIDE is D as a power of 2.
# ``do_not_specialize``: these change from call to call, and a new kernel must not be compiled for some of their values.


@triton.jit(do_not_specialize=["layer"])
def _store(
    k, v, k_apart, v_apart, slots, pool, layer, a_block,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """K and V of one token, all heads, into its slot. Tokens lie ``k_apart`` and ``v_apart`` numbers apart."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)  # int64, as all that is multiplied by a block's size: a pool has more than 2**31 numbers
    number = tl.arange(0, ALL)  # of the token's KV_HEADS x D
    mine = number < KV_HEADS * D
    place = slot // BLOCK * a_block + layer * (2 * KV_HEADS * BLOCK * D) + slot % BLOCK * D
    target = pool + place + number // D * (BLOCK * D) + number % D
    tl.store(target, tl.load(k + token * k_apart + number, mask=mine), mask=mine)
    tl.store(target + KV_HEADS * BLOCK * D, tl.load(v + token * v_apart + number, mask=mine), mask=mine)


@triton.jit
def _dot(a, b):
    """a @ b in float32; "ieee": no tf32 for float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _walk(
    q, largest, total, sums, keys, a_block, table, begin, end, sees,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of q [rows, WIDE] over the positions begin .. end of one sequence.

    ``keys`` points to slot 0 of block 0, in this layer and KV head. ``largest`` [rows] is the largest score so far, ``total`` [rows] the
    sum of the weights under it, ``sums`` [rows, WIDE] that of the weighted values. Row r sees the positions below sees[r]; MASKED
    says whether there are others: most tiles of a long prompt lie wholly in the past, and need no look at it.
    """
    scale = 1.4426950408889634 / tl.sqrt(float(D))  # weights are powers of 2, not of e: the hardware has exp2
    d = tl.arange(0, WIDE)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        if MASKED:
            there = (position < end)[:, None] & (d < D)[None, :]
            block = tl.load(table + position // BLOCK, mask=position < end, other=0)
        else:
            there = (d < D)[None, :] & (position >= 0)[:, None]
            block = tl.load(table + position // BLOCK)
        place = block.to(tl.int64) * a_block + position % BLOCK * D
        k = tl.load(keys + place[:, None] + d[None, :], mask=there, other=0.0)  # [TILE, WIDE]; 0: an unwritten slot may hold nan
        v = tl.load(keys + KV_HEADS * BLOCK * D + place[:, None] + d[None, :], mask=there, other=0.0)
        scores = _dot(q, tl.trans(k)) * scale  # [rows, TILE]
        if MASKED:
            scores = tl.where(position[None, :] < sees[:, None], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - new)
        weights = tl.exp2(scores - new[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + _dot(weights.to(v.dtype), v)
        largest = new
    return largest, total, sums


@triton.jit(do_not_specialize=["layer", "a_table"])
def _decode(
    q, q_apart, out, pool, layer, a_block, tables, a_table, query_starts, contexts, partial, state,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One query of a sequence, the heads of one group, over one share of its context."""
    s, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_starts + s)
    if tl.load(query_starts + s + 1) - first != 1:
        return  # a chunk: _prefill takes it
    GROUP: tl.constexpr = HEADS // KV_HEADS
    context, splits = tl.load(contexts + s), tl.num_programs(2)
    share = tl.cdiv(tl.cdiv(context, splits), TILE) * TILE
    begin = split * share
    end = tl.minimum(begin + share, context)

    row, d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    head = h * GROUP + row
    mine = (row < GROUP)[:, None] & (d < D)[None, :]
    queries = tl.load(q + first.to(tl.int64) * q_apart + head[:, None] * D + d[None, :], mask=mine, other=0.0)
    keys = pool + layer * (2 * KV_HEADS * BLOCK * D) + h * (BLOCK * D)
    # The first "largest" is finite: -inf - -inf would be nan.
    largest, total, sums = tl.full([ROWS], -3.0e38, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    largest, total, sums = _walk(
        queries, largest, total, sums, keys, a_block, tables + s.to(tl.int64) * a_table, begin, end, end + row * 0,
        KV_HEADS, BLOCK, D, WIDE, TILE, True,
    )  # fmt: skip
    if SPLIT:
        at = (s.to(tl.int64) * HEADS + head) * splits + split
        tl.store(partial + at[:, None] * D + d[None, :], sums, mask=mine)
        tl.store(state + 2 * at, largest, mask=row < GROUP)
        tl.store(state + 2 * at + 1, total, mask=row < GROUP)
    else:
        at = (first.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["splits"])
def _join(partial, state, out, query_starts, splits, HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr):
    """What the programs of one sequence and head found, each under its own largest score, put under the largest of all."""
    s, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + s)
    if tl.load(query_starts + s + 1) - first != 1:
        return
    split, d = tl.arange(0, MOST), tl.arange(0, WIDE)
    at = (s.to(tl.int64) * HEADS + head) * splits + split
    largest = tl.load(state + 2 * at, mask=split < splits, other=-3.0e38)
    total = tl.load(state + 2 * at + 1, mask=split < splits, other=0.0)
    mine = (split < splits)[:, None] & (d < D)[None, :]
    sums = tl.load(partial + at[:, None] * D + d[None, :], mask=mine, other=0.0)
    weight = tl.exp2(largest - tl.max(largest, 0))
    joined = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + (first.to(tl.int64) * HEADS + head) * D + d, joined.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["layer", "a_table"])
def _prefill(
    q, q_apart, out, pool, layer, a_block, tables, a_table, query_starts, contexts, chunks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some tokens of one chunk, the heads of one group: row r is the token r // GROUP of them with its head r % GROUP."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    s = tl.load(chunks + tl.program_id(2))
    part, h = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # a chunk's end sees the most: it goes first
    first = tl.load(query_starts + s)
    count, context = tl.load(query_starts + s + 1) - first, tl.load(contexts + s)
    if part * TOKENS >= count:
        return
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    token, head = part * TOKENS + row // GROUP, h * GROUP + row % GROUP
    mine = ((row < TOKENS * GROUP) & (token < count))[:, None] & (d < D)[None, :]
    at = (first + token).to(tl.int64)[:, None]
    queries = tl.load(q + at * q_apart + head[:, None] * D + d[None, :], mask=mine, other=0.0)
    keys = pool + layer * (2 * KV_HEADS * BLOCK * D) + h * (BLOCK * D)
    table = tables + s.to(tl.int64) * a_table
    sees = context - count + token + 1  # the mask aligns at the bottom right: the chunk's last token sees the whole context
    end = tl.minimum(context - count + (part + 1) * TOKENS, context)
    past = (context - count + part * TOKENS + 1) // TILE * TILE  # whole tiles that every row sees
    largest, total, sums = tl.full([ROWS], -3.0e38, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    largest, total, sums = _walk(queries, largest, total, sums, keys, a_block, table, 0, past, sees, KV_HEADS, BLOCK, D, WIDE, TILE, False)
    largest, total, sums = _walk(queries, largest, total, sums, keys, a_block, table, past, end, sees, KV_HEADS, BLOCK, D, WIDE, TILE, True)
    tl.store(out + (at * HEADS + head[:, None]) * D + d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), mask=mine)
