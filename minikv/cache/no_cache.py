"""No cache at all: every new token recomputes all before it.

This is how a transformer is written down, and the oracle of the whole engine: it holds no state that could be wrong.
To generate m tokens after n it pushes n + (n+1) + ... + (n+m-1) tokens through the model, of which all but the last of
each round were computed in the round before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.cache.attention.reference import attend_one
from minikv.cache.step import Piece
from minikv.cache.whole import Generation, check_tokens, pack
from minikv.model.weights import Model


class NoCache:
    """Keeps nothing: each piece must be its whole sequence, from position 0."""

    def __init__(self) -> None:
        self._lengths: list[int] = []

    def begin(self, pieces: Sequence[Piece], device: str | torch.device = "cpu"):  # type: ignore[no-untyped-def]
        """Say who is in the step. ValueError for a piece that does not start at 0: there is no earlier K and V."""
        for piece in pieces:
            if piece.start:
                raise ValueError(f"sequence {piece.sequence!r} starts at {piece.start}, but without a cache nothing before it is known")
        packed = pack(pieces, device)
        self._lengths = [len(piece.tokens) for piece in pieces]
        return packed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention within each sequence of the step; shapes as in ``KeyValueStore``."""
        parts = zip(q.split(self._lengths), k.split(self._lengths), v.split(self._lengths), strict=True)
        return torch.cat([attend_one(q1, k1.transpose(0, 1), v1.transpose(0, 1)) for q1, k1, v1 in parts])


def logits(model: Model, token_ids: Sequence[int]) -> Tensor:
    """One uncached pass over ``token_ids``, the oracle: [tokens, vocab] in the model's dtype.

    RequestError for no tokens, ids outside the vocabulary, or more tokens than the model's context.
    """
    tokens = check_tokens(model, token_ids)
    kv = NoCache()
    step = kv.begin([Piece("oracle", tokens, logits="all")], model.device)
    with torch.inference_mode():
        return model(step.token_ids, step.positions, kv)


def generate_without_cache(model: Model, prompt: str | Sequence[int], n: int) -> Generation:
    """``n`` greedy tokens after ``prompt`` (text or ids), recomputing the whole sequence for each.

    RequestError for an empty prompt, n below 1, or a sequence that outgrows the model's context.
    """
    out = Generation(model, prompt, n)
    while not out.done:
        out.append(logits(model, out.prompt + out.tokens)[-1], computed_tokens=len(out.prompt) + len(out.tokens))
    return out
