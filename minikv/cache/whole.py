"""One sequence from start to end, without an engine: what chapters 1 and 2 need around their caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from minikv.cache.step import Piece, to_token_ids
from minikv.errors import RequestError
from minikv.model.weights import Model


@dataclass
class PackedTokens:
    """The packed tokens of a step: token_ids, positions [tokens] and logit_rows [rows], int64."""

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor


def pack(pieces: Sequence[Piece], device: str | torch.device) -> PackedTokens:
    """Lay the pieces' tokens behind each other. ValueError for a step or a piece without tokens."""
    if not pieces or not all(len(piece.tokens) for piece in pieces):
        raise ValueError("a step needs at least one piece, and a piece at least one token")
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for piece in pieces:
        first = len(ids)
        ids += piece.tokens
        positions += range(piece.start, piece.end)
        if piece.logits == "all":
            rows += range(first, len(ids))
        elif piece.logits == "last":
            rows.append(len(ids) - 1)
    return PackedTokens(*(torch.tensor(values, device=device, dtype=torch.int64) for values in (ids, positions, rows)))


def check_tokens(model: Model, prompt: str | Sequence[int], more: int = 0) -> list[int]:
    """``prompt`` as token ids, if ``model`` can run them and ``more`` behind them; RequestError with the numbers if not."""
    tokens, longest = to_token_ids(prompt, model.tokenizer, model.shape.vocab), model.shape.max_context
    if len(tokens) + more > longest:
        raise RequestError(
            f"{len(tokens)} prompt tokens and {more} more to be fed back are {len(tokens) + more}, more than the model's "
            f"context of {longest}; shorten the prompt or ask for fewer tokens"
        )
    return tokens


@dataclass
class Generation:
    """A greedy generation under way: give it the last row's logits, and it takes the most likely token.

    ``computed_tokens`` counts the tokens that went through the model; ``token_times_s`` are seconds since the start.
    """

    model: Model
    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    computed_tokens: int = 0

    def __init__(self, model: Model, prompt: str | Sequence[int], n: int) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise RequestError(f"n is the number of tokens to generate: at least 1, not {n!r}")
        self.model, self.max_new_tokens = model, n
        self.prompt = check_tokens(model, prompt, more=n - 1)
        self.tokens, self.token_times_s, self.computed_tokens = [], [], 0
        self._started_at = perf_counter()

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.max_new_tokens

    @property
    def text(self) -> str | None:
        """The generated tokens as text; None when the model has no tokenizer."""
        return None if self.model.tokenizer is None else self.model.tokenizer.decode(self.tokens)

    def append(self, last_logits: Tensor, computed_tokens: int) -> None:
        """Take the most likely next token. last_logits [vocab]; ``computed_tokens`` went through the model for it."""
        self.tokens.append(int(last_logits.argmax()))
        self.computed_tokens += computed_tokens
        self.token_times_s.append(perf_counter() - self._started_at)
