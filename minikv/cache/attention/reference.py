"""Paged attention as plainly as it can be said in torch: gather the blocks, mask the future, softmax, sum.

Slow on purpose and right by inspection: the other dialects are tested against it. It follows section 4.1 of the
PagedAttention paper (arXiv 2309.06180) and runs in any dtype on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minikv.cache.paged import StepTensors


def attend(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, layer: int, step: StepTensors) -> Tensor:
    """Shapes and meaning: see the package's docstring."""
    block_size = pool.shape[4]
    block, slot = step.slots // block_size, step.slots % block_size
    pool[block, layer, 0, :, slot] = k
    pool[block, layer, 1, :, slot] = v
    outs = []
    for sequence, (first, count, context) in enumerate(step.pieces):
        blocks = step.block_tables[sequence, : -(-context // block_size)]
        keys, values = pool[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]  # [kv_heads, context, head_dim]
        outs.append(attend_one(q[first : first + count], keys, values))
    return torch.cat(outs)


def attend_one(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one sequence's last tokens over all of its tokens.

    q [queries, heads, head_dim]; keys, values [kv_heads, context, head_dim], the queries being the last of the
    context: query i stands at position context - queries + i and sees the positions up to its own. The mask therefore
    aligns at the bottom right, and a single query sees everything. Returns [queries, heads, head_dim].
    """
    queries, heads, head_dim = q.shape
    kv_heads, context, _ = keys.shape
    q = q.unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3)  # [kv_heads, group, queries, head_dim]
    compute = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(compute) @ keys.to(compute)[:, None].transpose(-1, -2) * head_dim**-0.5  # [kv_heads, group, queries, context]
    position = torch.arange(context - queries, context, device=q.device)
    future = torch.arange(context, device=q.device) > position[:, None]  # [queries, context]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    out = weights @ values.to(compute)[:, None]  # [kv_heads, group, queries, head_dim]
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
