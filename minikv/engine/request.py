"""A request on its way through the engine, and what the caller sees of it.

A request is a prompt and a wish (``Sampling``). It becomes one sequence, or ``n`` of them that share the prompt. A
sequence is a list of tokens of which the first ``table.num_tokens`` have K and V in the cache; everything behind them
is pending. That one number describes all of its life: a new sequence has everything pending, one in chunked prefill a
part, one that decodes a single token, the last that was sampled. Preemption takes the blocks away and makes
everything pending again; no other state needs to be restored, which is why the tokens come out the same.

    waiting --admit--> running --last token--> finished
       ^                  |
       +----- preempt ----+
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minikv.cache.blocks import BlockTable
from minikv.cache.prefix import KeyChain
from minikv.model.sampling import Sampling


class State(Enum):
    """Where a sequence is; it is in exactly one of the scheduler's lists accordingly."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Output:
    """What has come of one sequence so far. ``step`` returns the same object each time, grown.

    ``cached_tokens`` counts the tokens of the prompt that were found in the cache at its first admission, and
    ``computed_tokens`` all that went through the model for it, recomputation after a preemption included. Times are
    seconds since the request was added; ``token_times_s[0]`` is the time to first token. ``finish_reason`` is
    "length", "stop" or "abort". With ``n`` above 1 there are n outputs with one request_id and ``sample`` 0 to n - 1; the
    prompt is looked up and computed once, for sample 0, and its ``cached_tokens`` stand on each.
    """

    request_id: Hashable
    sample: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    token_times_s: list[float] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    new_text: str = ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before there is one."""
        return self.token_times_s[0] if self.token_times_s else None


class Request:
    """A prompt, how it is to be continued, and since when it has waited."""

    __slots__ = ("arrived_at", "namespace", "prompt", "request_id", "salt", "sampling", "seed", "sequences", "stop_tokens")

    def __init__(
        self, request_id: Hashable, prompt: list[int], sampling: Sampling, salt: str | None, arrived_at: float, stop_tokens: frozenset[int]
    ) -> None:
        self.request_id, self.prompt, self.sampling, self.salt = request_id, prompt, sampling, salt
        self.namespace = b""  # where its prefix keys begin; set by the engine
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self.arrived_at, self.stop_tokens = arrived_at, stop_tokens
        self.sequences: list[Sequence] = []


class Sequence:
    """One text in the making: its tokens, its blocks, and its output."""

    __slots__ = ("chain", "held_text", "output", "published_blocks", "request", "sample", "state", "table", "text_stream", "tokens")

    def __init__(self, request: Request, sample: int, block_size: int) -> None:
        self.request, self.sample = request, sample
        self.tokens = request.prompt.copy()  # the prompt and what was generated
        self.table = BlockTable(block_size)
        self.chain = KeyChain(request.namespace, block_size)
        self.published_blocks = 0  # of the table's blocks, how many have been offered to the prefix cache
        self.state = State.WAITING
        self.output = Output(request.request_id, sample)
        self.text_stream: Any = None
        self.held_text = ""  # text that may turn out to be the beginning of a stop string

    @property
    def pending_tokens(self) -> int:
        """Tokens that have no K and V yet; never 0 while the sequence lives."""
        return len(self.tokens) - self.table.num_tokens

    @property
    def is_decoding(self) -> bool:
        """One token is pending and it was generated: the next step gives another one."""
        return self.pending_tokens == 1 and bool(self.output.tokens)

    @property
    def will_fork(self) -> bool:
        """The prompt is to be shared by n > 1 samples that do not exist yet."""
        return len(self.request.sequences) < self.request.sampling.n

    def fork(self, sample: int) -> Sequence:
        """A sequence with the same past and a table that names the same blocks (the caller counts the owners)."""
        other = Sequence(self.request, sample, self.table.block_size)
        other.tokens = self.tokens.copy()
        other.table.blocks, other.table.num_tokens = self.table.blocks[:], self.table.num_tokens
        other.chain, other.published_blocks = self.chain.copy(), self.published_blocks
        other.output.cached_tokens = self.output.cached_tokens
        return other
