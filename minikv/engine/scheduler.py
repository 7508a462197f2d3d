"""Who runs in the next step: continuous batching, decode first, chunked prefill, preemption. Policy without tensors.

A step has a budget of tokens. It is spent in three rounds:

    1. decode    every sequence that only lacks its next token gets one: someone is reading along
    2. prefill   sequences that are part-way through their prompt get as large a chunk as is left
    3. admit     waiting sequences, first come first served, as long as budget, places and blocks last

Blocks. A sequence is admitted only when there are blocks for all of its tokens, so prefill never runs out in the
middle; cached blocks that it hits and that nobody owns are not counted as free for it a second time. Decoding takes a
new block now and then. When there is none, the sequence that was admitted last gives up all of its blocks and waits at
the head of the queue; it will be computed again (preemption by recompute), unless its blocks are still cached. The
sequence that was admitted first can therefore always go on, and since every request was checked to fit alone, some
sequence always finishes: there is no deadlock.

The scheduler plans, somebody else computes, and ``commit`` books what was computed. If a step fails in between,
nothing has moved, and it can be planned again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from minikv.cache.blocks import BlockPool, blocks_for
from minikv.cache.prefix import PrefixCache
from minikv.cache.step import Piece
from minikv.engine.request import Sequence, State
from minikv.model.sampling import Draw


class Admission(Protocol):
    """Decides whether a waiting sequence may start now."""

    def admits(self, needed_blocks: int, available_blocks: int, running: int) -> bool:
        """``needed_blocks`` new blocks are wanted, ``available_blocks`` can be had, ``running`` sequences run already.

        True is final only within what exists: a policy that says yes to more blocks than there are is overruled.
        """
        ...


class AdmitWhatFits:
    """Everything that fits now may start."""

    def admits(self, needed_blocks: int, available_blocks: int, running: int) -> bool:
        return needed_blocks <= available_blocks


@dataclass(slots=True)
class Plan:
    """One step: copy these blocks, compute these pieces, then draw these tokens.

    ``sequences[i]`` owns ``pieces[i]``. ``draws`` lie in the order of the rows that want logits; ``receivers`` says
    which piece each draw belongs to (n > 1 samples draw several first tokens from one row). Whoever has made the
    copies empties the list: if the step then fails and is planned again, their sources may have been overwritten.
    """

    pieces: list[Piece] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    receivers: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_rows: int = 0


class Scheduler:
    """Keeps the waiting and the running sequences and plans one step after another."""

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache | None,
        max_batch_tokens: int,
        max_batch_requests: int,
        admission: Admission | None = None,
    ) -> None:
        if max_batch_tokens < 1 or max_batch_requests < 1:
            raise ValueError(
                f"a step needs room for a token of a request; got max_batch_tokens={max_batch_tokens}, "
                f"max_batch_requests={max_batch_requests}"
            )
        self.pool, self.prefix, self.admission = pool, prefix, admission or AdmitWhatFits()
        self.max_batch_tokens = max_batch_tokens
        # Every running sequence must be able to get a token in every step, or the last ones would starve.
        self.max_batch_requests = min(max_batch_requests, max_batch_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.preemptions = 0
        self.prompt_tokens = 0  # of admitted requests, counted once
        self.hit_tokens = 0  # of those, found in the cache
        self._copies: list[tuple[int, int]] = []  # planned and not yet known to be done

    # ---------------------------------------------------------------- coming and going

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its blocks are free or cached afterwards."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self._release(sequence)
        sequence.state = State.FINISHED

    def _release(self, sequence: Sequence) -> None:
        table = sequence.table
        self.pool.release(reversed(table.blocks))  # the tail first, so that it is evicted first
        del table.blocks[:]
        table.num_tokens = 0
        sequence.published_blocks, sequence.chain.linked = 0, None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = State.WAITING
        sequence.output.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    # ---------------------------------------------------------------- planning

    def plan(self) -> Plan:
        """The next step. Empty when nothing can run; admissions and preemptions have happened by then."""
        plan = Plan()
        preempted = self.preemptions
        self._plan_decodes(plan)
        for sequence in self.running:
            if not sequence.is_decoding and plan.num_tokens < self.max_batch_tokens:
                self._schedule(plan, sequence)
        if self.preemptions == preempted:  # who had to give way would only come back to give way again
            self._admit(plan)
        plan.copies = self._copies
        return plan

    def _plan_decodes(self, plan: Plan) -> None:
        served = 0
        while served < len(self.running):
            sequence = self.running[served]
            if not sequence.is_decoding or self._make_room(sequence):
                if sequence.is_decoding:
                    self._schedule(plan, sequence)
                served += 1

    def _make_room(self, sequence: Sequence) -> bool:
        """A block of its own for the next token of ``sequence``; False when it had to give way itself."""
        table = sequence.table
        position = table.num_tokens
        shared_tail = position < table.capacity_tokens and not self.pool.writable(table.locate(position)[0])
        if position < table.capacity_tokens and not shared_tail:
            return True
        while self.pool.num_free == 0:
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
            if shared_tail and self.pool.writable(table.locate(position)[0]):
                return True  # the other owner of the tail was the one that gave way
        block = self.pool.allocate()
        if shared_tail:
            old, table.blocks[-1] = table.blocks[-1], block
            self.pool.release((old,))
            self._copies.append((old, block))
        else:
            table.blocks.append(block)
        return True

    def _schedule(self, plan: Plan, sequence: Sequence) -> None:
        """Add as much of ``sequence`` to the plan as the budget allows."""
        start = sequence.table.num_tokens
        count = min(len(sequence.tokens) - start, self.max_batch_tokens - plan.num_tokens)
        end = start + count
        complete = end == len(sequence.tokens)
        self._assert_writable(sequence, start, end)
        plan.pieces.append(Piece(sequence, sequence.tokens[start:end], start, sequence.table, "last" if complete else "none"))
        plan.sequences.append(sequence)
        plan.num_tokens += count
        if complete:
            request = sequence.request
            samples = range(request.sampling.n) if sequence.will_fork else (sequence.sample,)
            for sample in samples:
                plan.draws.append(Draw(plan.num_rows, request.sampling, request.seed, sample, len(sequence.output.tokens)))
                plan.receivers.append(sequence)
            plan.num_rows += 1

    def _assert_writable(self, sequence: Sequence, start: int, end: int) -> None:
        table = sequence.table
        for index in range(start // table.block_size, (end - 1) // table.block_size + 1):
            block = table.blocks[index]
            assert self.pool.writable(block), f"block {block} would be written to, but it is shared or has a key"

    def _admit(self, plan: Plan) -> None:
        while self.waiting and plan.num_tokens < self.max_batch_tokens and len(self.running) < self.max_batch_requests:
            sequence = self.waiting[0]
            if not self._allocate(sequence):
                return  # first come, first served: nobody overtakes
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.state = State.RUNNING
            self._schedule(plan, sequence)

    def _allocate(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of ``sequence``, shared ones first; False, with nothing changed, when there are too few."""
        tokens, table, pool = sequence.tokens, sequence.table, self.pool
        hits = []
        if self.prefix is not None:
            sequence.chain.extend(tokens)
            hits = self.prefix.lookup(sequence.chain, most=(len(tokens) - 1) // table.block_size)  # one token must be computed
        needed = blocks_for(len(tokens), table.block_size) - len(hits)
        available = pool.num_free - sum(pool.is_evictable(hit.block) for hit in hits)
        if needed > available or not self.admission.admits(needed, available, len(self.running)):
            return False
        shared = [hit.block for hit in hits]
        pool.share(shared)
        table.blocks.extend(shared)
        table.blocks.extend(pool.allocate_many(needed))
        table.num_tokens = len(hits) * table.block_size
        sequence.published_blocks, sequence.chain.linked = len(hits), hits[-1] if hits else None
        if not sequence.output.preemptions and not sequence.output.tokens:  # the first admission (a fork starts with a token)
            sequence.output.cached_tokens = table.num_tokens
            self.hit_tokens += table.num_tokens
            self.prompt_tokens += len(tokens)
        return True

    # ---------------------------------------------------------------- booking

    def commit(self, plan: Plan) -> None:
        """Book a computed step: the pieces' tokens have K and V now, and full blocks can be found."""
        for piece, sequence in zip(plan.pieces, plan.sequences, strict=True):
            sequence.output.computed_tokens += piece.end - piece.start
            if sequence.state is State.FINISHED:
                continue  # aborted while it was computed: its blocks are somebody else's
            sequence.table.num_tokens = piece.end
            if self.prefix is not None and piece.end // sequence.table.block_size > sequence.published_blocks:
                sequence.chain.extend(sequence.tokens)
                sequence.published_blocks = self.prefix.publish(sequence.chain, sequence.table, sequence.published_blocks)
        self._copies = []

    def fork(self, sequence: Sequence, sample: int) -> Sequence:
        """Another sequence with the same past. It shares every block; whoever writes into the shared tail copies it first."""
        other = sequence.fork(sample)
        if len(self.running) < self.max_batch_requests:
            self.pool.share(other.table.blocks)
            other.state = State.RUNNING
            self.running.append(other)
        else:  # no place now: it waits, and will find the full blocks of the prompt in the prefix cache
            del other.table.blocks[:]
            other.table.num_tokens = other.published_blocks = 0
            other.chain.linked = None
            place = sum(waiting.request is other.request for waiting in self.waiting)  # behind its siblings
            self.waiting.insert(place, other)
        return other

    def sequences(self) -> Iterator[Sequence]:
        """Everyone who is not finished."""
        yield from self.running
        yield from self.waiting

    def check_integrity(self) -> None:
        """AssertionError unless every block is in exactly one place and every sequence in exactly one list."""
        for sequence in self.running:
            name = f"sample {sequence.sample} of {sequence.request.request_id!r}"
            assert sequence.state is State.RUNNING, f"{name} is {sequence.state.value} and stands among the running"
            assert sequence.pending_tokens >= 1, f"{name} runs with nothing to do"
            assert sequence.table.capacity_tokens >= sequence.table.num_tokens, "a table holds more tokens than slots"
        for sequence in self.waiting:
            name = f"sample {sequence.sample} of {sequence.request.request_id!r}"
            assert sequence.state is State.WAITING, f"{name} is {sequence.state.value} and stands among the waiting"
            assert not len(sequence.table), f"{name} waits and holds {len(sequence.table)} blocks"
        everyone = list(self.sequences())
        assert len(set(map(id, everyone))) == len(everyone), "a sequence stands in two places"
        assert len(self.running) <= self.max_batch_requests, f"{len(self.running)} run, {self.max_batch_requests} may"
        self.pool.check_integrity(sequence.table for sequence in everyone)
        if self.prefix is not None:
            self.prefix.check_integrity()
