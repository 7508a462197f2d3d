"""How cost grows: with the batch, with the context, with the pool; and what must not grow at all.

Arithmetic says what to expect. A decode step reads all weights once and every sequence's K and V, so its time has a
constant part and one that grows with batch times context; the size of the pool beside it must not matter. Bookkeeping
must not depend on how much is cached. And memory is a sum: the weights, and the pool's blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minikv.cache.paged import Paged
from minikv.lab import bookkeeping, start_up
from minikv.lab.ceilings import Ceilings
from minikv.lab.this_machine import step_times_s
from minikv.model.weights import Model
from minikv.shape.model_shape import ModelShape
from minikv.shape.roofline import step_cost

BLOCK_SIZE = 16
SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
SEQUENCES_CONTEXT = 256
CONTEXTS = (64, 256, 512, 1024, 2048, 4096)
CONTEXTS_SEQUENCES = (1, 8)
POOLS = (256, 1024, 4096, 16_384)
POOLS_SEQUENCES, POOLS_CONTEXT = 8, 512
MEMORY_POOLS = (512, 1024, 2048)


def measure(model: Model, ceilings: Ceilings, quick: bool = False, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything that ``plots.scaling`` draws. ``quick`` takes every other size and compiles nothing anew."""
    every, seconds = (2, 0.2) if quick else (1, 1.0)
    progress("a step against the batch")
    batch = [decode_row(model, ceilings, count, SEQUENCES_CONTEXT, seconds) for count in SEQUENCES[::every]]
    progress("a step against the context")
    context = [
        decode_row(model, ceilings, count, tokens, seconds)
        for count in CONTEXTS_SEQUENCES
        for tokens in CONTEXTS[::every]
        if tokens <= model.shape.max_context
    ]
    progress("a step against the pool")
    pool = [decode_row(model, ceilings, POOLS_SEQUENCES, POOLS_CONTEXT, seconds, blocks) for blocks in POOLS[::every]]
    progress("memory")
    memory = [weights_row(model), *(pool_row(model.shape, blocks) for blocks in MEMORY_POOLS[::every])]
    progress("bookkeeping")
    cached = bookkeeping.measure(bookkeeping.CACHED_BLOCKS[: 2 if quick else 3], rounds=3 if quick else 15)
    progress("start-up")
    started = start_up.measure(1 if quick else 3, compile_too=not quick)
    return {"batch": batch, "context": context, "pool": pool, "memory": memory, "bookkeeping": cached, "start_up_s": started}


def decode_row(
    model: Model, ceilings: Ceilings, sequences: int, context: int, seconds: float, pool_blocks: int | None = None
) -> dict[str, Any]:
    """Time of a decode step of ``sequences`` with ``context`` tokens each, and the least that it could take.

    The blocks lie scattered over a pool of ``pool_blocks`` (default: just those that are needed).
    """
    pieces = [(1, context)] * sequences
    times = step_times_s(model, pieces, BLOCK_SIZE, at_least=7, seconds=seconds, pool_blocks=pool_blocks)[2:]
    cost = step_cost(model.shape, pieces, sequences)
    return {
        "sequences": sequences, "context": context, "pool_blocks": pool_blocks, "step_s": median(times),
        "limit_s": cost.seconds(ceilings.bytes_per_s, ceilings.flops_per_s),
    }  # fmt: skip


def weights_row(model: Model) -> dict[str, Any]:
    """Bytes of the weights against what the arithmetic says; one float32 each. RSS: as for ``pool_row``.

    They are copied into one piece: small ones, one by one, would go where the process has room already, and it would not grow.
    """
    before = resident_bytes()
    copy = torch.cat([weight.flatten() for _, weight in model.named_weights()])
    return {
        "what": "weights", "computed_bytes": 4 * model.shape.parameters, "tensor_bytes": copy.nbytes, "rss_bytes": _grown(before),
    }  # fmt: skip


def pool_row(shape: ModelShape, num_blocks: int) -> dict[str, Any]:
    """Bytes of a pool of ``num_blocks`` blocks: by the arithmetic, of its tensor (one block more, for padding), and by how
    much the process grew when all of it had been written to (None where the system does not say)."""
    before = resident_bytes()
    paged = Paged(shape, num_blocks, BLOCK_SIZE)
    paged.pool.fill_(1.0)
    return {
        "what": f"pool of {num_blocks:,} blocks", "computed_bytes": num_blocks * BLOCK_SIZE * shape.kv_bytes_per_token("float32"),
        "tensor_bytes": paged.pool.nbytes, "rss_bytes": _grown(before),
    }  # fmt: skip


def resident_bytes() -> int | None:
    """Bytes of this process in memory (resident set size), where Linux says so."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _grown(before: int | None) -> int | None:
    now = resident_bytes()
    return None if now is None or before is None else now - before


def worst_memory_error(rows: Sequence[dict[str, Any]]) -> float:
    """The largest relative distance of what was measured from what was computed (RSS where it is known)."""
    return max(abs((row["rss_bytes"] or row["tensor_bytes"]) / row["computed_bytes"] - 1) for row in rows)
