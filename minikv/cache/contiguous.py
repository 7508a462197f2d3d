"""One growing buffer per sequence: the KV cache as it is first drawn on a blackboard.

Keys and values of earlier tokens never change, because a token only looks back. So keep them: the first pass over the
prompt (prefill) fills the buffer, and from then on every new token (decode) brings one row of K and V and reads all of
them. The buffer is reserved for ``max_tokens`` at once, as a contiguous cache must be if it is not to be copied while it
grows; what that reservation costs is the story of the chapters on fragmentation and paging.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from minikv.cache.attention.reference import attend_one
from minikv.cache.step import Piece
from minikv.cache.whole import Generation, PackedTokens, pack
from minikv.model.weights import Model
from minikv.shape.model_shape import ModelShape


class Contiguous:
    """K and V of each sequence in a buffer of its own, [layer, k or v, kv_head, max_tokens, head_dim].

    A sequence gets its buffer when it first appears in a step and keeps it until ``drop``.
    """

    def __init__(self, shape: ModelShape, max_tokens: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> None:
        self.shape, self.max_tokens, self.dtype, self.device = shape, max_tokens, dtype, torch.device(device)
        self.lengths: dict[Hashable, int] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._pieces: list[Piece] = []

    def begin(self, pieces: Sequence[Piece]) -> PackedTokens:
        """Say who is in the step.

        Raises ValueError, changing nothing, when a sequence would outgrow its buffer, does not go on where it ended, or
        is named twice in the step.
        """
        if len({piece.sequence for piece in pieces}) < len(pieces):
            raise ValueError("a sequence is named twice in one step")
        for piece in pieces:
            length = self.lengths.get(piece.sequence, 0)
            if piece.start != length:
                raise ValueError(f"sequence {piece.sequence!r} has {length} tokens in the cache and cannot go on at {piece.start}")
            if piece.end > self.max_tokens:
                raise ValueError(
                    f"sequence {piece.sequence!r} would have {piece.end} tokens, its buffer holds {self.max_tokens}; "
                    "make the buffer larger or the sequence shorter"
                )
        packed = pack(pieces, self.device)
        shape = self.shape
        for piece in pieces:
            if piece.sequence not in self._buffers:
                size = (shape.layers, 2, shape.kv_heads, self.max_tokens, shape.head_dim)
                self._buffers[piece.sequence] = torch.empty(size, dtype=self.dtype, device=self.device)
            self.lengths[piece.sequence] = piece.end
        self._pieces = list(pieces)
        return packed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v to each sequence's buffer, attend over all of it; shapes as in ``KeyValueStore``."""
        outs, first = [], 0
        for piece in self._pieces:
            last = first + len(piece.tokens)
            buffer = self._buffers[piece.sequence][layer]  # [2, kv_heads, max_tokens, head_dim]
            buffer[0, :, piece.start : piece.end] = k[first:last].transpose(0, 1)
            buffer[1, :, piece.start : piece.end] = v[first:last].transpose(0, 1)
            outs.append(attend_one(q[first:last], buffer[0, :, : piece.end], buffer[1, :, : piece.end]))
            first = last
        return torch.cat(outs)

    def drop(self, sequence: Hashable) -> None:
        """Forget a sequence, its length too. KeyError when there is none of this name."""
        del self._buffers[sequence], self.lengths[sequence]


def generate_with_cache(model: Model, prompt: str | Sequence[int], n: int) -> Generation:
    """``n`` greedy tokens after ``prompt`` (text or ids): one prefill, then one token a step.

    RequestError for an empty prompt, n below 1, or a sequence that outgrows the model's context.
    """
    out = Generation(model, prompt, n)
    kv = Contiguous(model.shape, len(out.prompt) + n - 1, model.dtype, model.device)
    new, start = out.prompt, 0
    with torch.inference_mode():
        while not out.done:
            step = kv.begin([Piece("only", new, start)])
            last = model(step.token_ids, step.positions, kv, step.logit_rows)[0]
            out.append(last, computed_tokens=len(new))
            start += len(new)
            new = out.tokens[-1:]
    return out
