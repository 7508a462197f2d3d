"""Who is in a step: which tokens of which sequence are computed now, and where their K and V belong.

A step computes some tokens of some sequences. A prompt may come whole or in pieces (chunks); a sequence that decodes
brings one token. For a cache it is all the same: a ``Piece`` says where it starts, and the model computes whatever is
in it. This module is plain bookkeeping and imports no torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from minikv.cache.blocks import BlockTable


@dataclass(slots=True)
class Piece:
    """One sequence's share of a step.

    ``tokens`` are the ids to compute now, the first of them at position ``start``; everything before ``start`` is in
    the cache already. ``table`` says which blocks hold the sequence (only the paged cache reads it). ``logits`` says
    which rows of the piece want logits: none (a prompt's middle chunk), the last (to sample from), or all.
    """

    sequence: Hashable
    tokens: Sequence[int]
    start: int = 0
    table: BlockTable | None = None
    logits: Literal["none", "last", "all"] = "last"

    @property
    def end(self) -> int:
        """Tokens of the sequence that have K and V after this step."""
        return self.start + len(self.tokens)
