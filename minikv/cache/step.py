"""Who is in a step: which tokens of which sequence are computed now, and where their K and V belong.

A step computes some tokens of some sequences. A prompt may come whole or in pieces (chunks); a sequence that decodes
brings one token. For a cache it is all the same: a ``Piece`` says where it starts, and the model computes whatever is
in it. This module is plain bookkeeping and imports no torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

from minikv.cache.blocks import BlockTable
from minikv.errors import RequestError


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


def to_token_ids(prompt: str | Sequence[int], tokenizer: Any, vocab: int) -> list[int]:
    """``prompt``, text or token ids, as checked token ids.

    RequestError for text without a tokenizer or that is no valid Unicode, and for what ``check_token_ids`` refuses.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("the prompt is text, but this model has no tokenizer; give token ids")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as wrong:
            raise RequestError(f"the prompt is no valid Unicode text: {wrong}") from None
        return check_token_ids(tokenizer.encode(prompt), vocab)
    return check_token_ids(prompt, vocab)


def check_token_ids(prompt: Sequence[int], vocab: int) -> list[int]:
    """``prompt`` as a list of whole numbers in 0 .. vocab - 1; RequestError, naming the first wrong one, otherwise."""
    try:
        if isinstance(prompt, (bytes, bytearray, set, frozenset, dict)):
            raise TypeError
        tokens = list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)  # arrays and tensors know their numbers best
        if set(map(type, tokens)) - {int}:
            if any(isinstance(token, bool) for token in tokens):
                raise TypeError
            tokens = [index(token) for token in tokens]
    except TypeError:
        raise RequestError("a prompt is text or a sequence of token ids (whole numbers)") from None
    if not tokens:
        raise RequestError("the prompt is empty: a model needs at least one token to predict the next")
    if min(tokens) < 0 or max(tokens) >= vocab:
        place, token = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < vocab)
        raise RequestError(f"token id {token} at place {place} is outside the vocabulary of {vocab} (0 to {vocab - 1})")
    return tokens
