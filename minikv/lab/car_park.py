"""The car park: the same requests in the same KV memory, once in one piece each and once in pages.

Requests come, wait in line (first come, first served) until the memory takes them, write one token a tick, and leave.
All that differs is how the memory is given out: three ways to reserve x four ways to place (``minikv.cache.arena``), or
blocks on demand (``minikv.cache.blocks``). At every tick each slot of the memory is one of

    held        a token is written in it
    reserved    its owner will write it later
    internal    its owner never writes it: internal fragmentation
    rounding    the buddy allocator gave it on top of what was reserved
    free        nobody has it, and while somebody waits that is external fragmentation

Figure 2 of the PagedAttention paper (arXiv 2309.06180) shows the first three and calls the last two together "external
fragmentation & others". A slot that is free because nobody wants it is no waste, so the averages are over the ticks at
whose end somebody waits (if nobody ever does: at which somebody runs).

Prefill takes no time here: a request writes its prompt and its first token in the tick that admits it. Its last token
takes a slot too. Pages can run out while requests grow; then the one that was admitted last goes back to the head of
the line and its tokens are computed anew, as in the paper's section 4.5 (``preemptions``, ``recomputed_tokens``).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minikv.cache.arena import PLACEMENTS, RESERVATIONS, Arena, Segment
from minikv.cache.blocks import BlockPool, BlockTable, blocks_for

PAPER_SLOTS = 15_700  # the KV memory of a 13B model on a 40 GB GPU, table 1 of the paper


@dataclass(frozen=True)
class Request:
    """Comes at tick ``arrival`` with ``prompt_tokens`` and leaves when ``output_tokens`` more are written."""

    arrival: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if self.arrival < 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"a request comes at tick 0 or later, with a token in and a token out at least: {self}")

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Trace:
    """Requests in the order of arrival (a request's place is its name) for a model that does ``max_tokens`` tokens.

    The first ``shared_prefix_tokens`` of every prompt are the same system prompt. ValueError when the numbers do not agree.
    """

    requests: tuple[Request, ...]
    max_tokens: int
    shared_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        arrivals = [request.arrival for request in self.requests]
        if not arrivals or arrivals != sorted(arrivals):
            raise ValueError("a trace has at least one request, and they stand in the order of arrival")
        for name, request in enumerate(self.requests):
            if request.total_tokens > self.max_tokens or not 0 <= self.shared_prefix_tokens <= request.prompt_tokens:
                raise ValueError(f"request {name} does not fit {self.max_tokens=} and {self.shared_prefix_tokens=}: {request}")


def chats(
    count: int = 500, *, seed: int = 0, requests_per_tick: float = 0.2, max_tokens: int = 2048, shared_prefix_tokens: int = 0
) -> Trace:
    """``count`` requests that resemble the ShareGPT conversations of the paper's section 6. The same seed, the same trace.

    Lengths are log-normal, with the paper's means (figure 11: prompt 161, output 338 tokens) and a spread that is our
    choice (sigma = 1: one in six is more than e times the median). A pair longer than ``max_tokens`` is drawn again, which
    takes the means to about 155 and 302 (for 2,048). Arrivals are Poisson. At 0.2 requests a tick and an answer of some 300 ticks, 60
    requests would run at once if memory were no limit; 15,700 slots hold about 30 such requests, so somebody always waits.
    ``shared_prefix_tokens`` are put before every prompt, as a system prompt.
    """
    if count < 1 or requests_per_tick <= 0 or max_tokens - shared_prefix_tokens < 161 + 338:
        raise ValueError(f"no chats of 161 + 338 tokens with {count=}, {requests_per_tick=}, {max_tokens=}, {shared_prefix_tokens=}")
    rng = random.Random(seed)

    def length(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0)))  # a log-normal's mean is exp(mu + sigma^2 / 2)

    requests: list[Request] = []
    now = 0.0
    while len(requests) < count:
        prompt_tokens, output_tokens = shared_prefix_tokens + length(161), length(338)
        if prompt_tokens + output_tokens <= max_tokens:
            now += rng.expovariate(requests_per_tick)
            requests.append(Request(int(now), prompt_tokens, output_tokens))
    return Trace(tuple(requests), max_tokens, shared_prefix_tokens)


class Usage(NamedTuple):
    """What the slots of the memory are at one tick. They add up to all of them."""

    held: int
    reserved: int
    internal: int
    rounding: int
    free: int


@dataclass(frozen=True)
class Snapshot:
    """The memory right after something happened at ``tick``, ready to be drawn. An owner is a place in ``trace.requests``."""

    tick: int
    event: str
    segments: tuple[Segment, ...]
    waiting: int

    @property
    def tokens(self) -> dict[int, int]:
        """Written tokens of each owner."""
        held: dict[int, int] = {}
        for segment in self.segments:
            if isinstance(segment.owner, int):
                held[segment.owner] = held.get(segment.owner, 0) + segment.tokens
        return held


@dataclass(frozen=True)
class Result:
    """What one way of giving out memory made of a trace. Shares are of all slots, averaged (see the module's docstring).

    ``waited``: requests that were refused at least once. ``refused_by_holes``: those of them that were once refused
    although the slots they wanted were free in total, only not in one piece. ``mean_requests``: running at once.
    """

    reservation: str
    placement: str
    slots: int
    held: float
    reserved: float
    internal: float
    rounding: float
    free: float
    duplicate: float  # part of held: every copy of the shared prefix but one
    mean_requests: float
    finished: int
    waited: int
    refused_by_holes: int
    moved_tokens: int
    preemptions: int
    recomputed_tokens: int
    usage: tuple[Usage, ...]  # of every tick
    snapshots: tuple[Snapshot, ...]

    @property
    def name(self) -> str:
        return f"{self.reservation}, {self.placement}"

    @property
    def external(self) -> float:
        """The paper's "external fragmentation & others"."""
        return self.rounding + self.free


class _OnePiece:
    """An arena, and what each request reserved in it."""

    def __init__(self, arena: Arena, reservation: str, max_tokens: int) -> None:
        self.arena, self.reserve, self.max_tokens = arena, RESERVATIONS[reservation], max_tokens
        self.asked: dict[int, int] = {}

    def wanted(self, request: Request, tokens: int) -> int:
        return self.reserve(request.prompt_tokens, request.output_tokens, self.max_tokens)

    def fits(self, request: Request, tokens: int) -> bool:
        return self.arena.can_allocate(self.wanted(request, tokens))

    @property
    def free_slots(self) -> int:
        return self.arena.free_slots

    def admit(self, name: int, request: Request, tokens: int) -> None:
        self.asked[name] = self.wanted(request, tokens)
        self.arena.allocate(name, self.asked[name])
        self.arena.write(name, tokens)

    def write(self, name: int) -> bool:
        self.arena.write(name)
        return True

    def leave(self, name: int) -> None:
        self.arena.free(name)
        del self.asked[name]

    def sizes(self, name: int) -> tuple[int, int]:
        return self.asked[name], self.arena.rounded(self.asked[name])

    def segments(self) -> Iterable[Segment]:
        return self.arena.segments()

    @property
    def moved_tokens(self) -> int:
        return self.arena.moved_tokens


class _Pages:
    """A block pool, and each request's block table."""

    moved_tokens = 0

    def __init__(self, slots: int, block_size: int) -> None:
        self.pool, self.block_size, self.slots = BlockPool(slots // block_size, block_size), block_size, slots
        self.tables: dict[int, BlockTable] = {}

    def wanted(self, request: Request, tokens: int) -> int:
        return blocks_for(tokens + 1, self.block_size) * self.block_size  # and the token that it writes at once

    def fits(self, request: Request, tokens: int) -> bool:
        return self.wanted(request, tokens) <= self.free_slots

    @property
    def free_slots(self) -> int:
        return self.pool.num_free * self.block_size

    def admit(self, name: int, request: Request, tokens: int) -> None:
        table = self.tables[name] = BlockTable(self.block_size)
        table.blocks.extend(self.pool.allocate_many(blocks_for(tokens, self.block_size)))
        table.num_tokens = tokens

    def write(self, name: int) -> bool:
        table = self.tables[name]
        if table.last_block_is_full:
            if not self.pool.num_free:
                return False
            table.blocks.append(self.pool.allocate())
        table.num_tokens += 1
        return True

    def leave(self, name: int) -> None:
        self.pool.release(reversed(self.tables.pop(name).blocks))

    def sizes(self, name: int) -> tuple[int, int]:
        return self.tables[name].capacity_tokens, self.tables[name].capacity_tokens

    def segments(self) -> Iterable[Segment]:
        size, owned = self.block_size, {}
        for name, table in self.tables.items():
            for place, block in enumerate(table.blocks):
                owned[block] = Segment(name, block * size, size, min(size, table.num_tokens - place * size))
        end = 0  # of what is drawn already; free blocks between two owned ones, and a rest too small for a block, are one hole
        for block in sorted(owned):
            if block * size > end:
                yield Segment(None, end, block * size - end)
            yield owned[block]
            end = (block + 1) * size
        if end < self.slots:
            yield Segment(None, end, self.slots - end)


def simulate(
    trace: Trace,
    slots: int = PAPER_SLOTS,
    reservation: str = "maximum",
    placement: str = "first_fit",
    *,
    block_size: int = 16,
    ticks: int | None = None,
    snapshots: int = 100,
) -> Result:
    """Run ``trace`` through one memory of ``slots`` slots, for ``ticks`` ticks or until every request is done.

    ``reservation`` is one of ``arena.RESERVATIONS``, and then ``placement`` one of ``arena.PLACEMENTS``; or ``"paged"``, and
    then only ``block_size`` counts. The result keeps the memory after each of the first ``snapshots`` events. ValueError,
    before anything runs, when a request could never fit.
    """
    if block_size < 1 or (ticks is not None and ticks < 1):
        raise ValueError(f"a simulation needs blocks of at least one slot and at least one tick; got {block_size=}, {ticks=}")
    memory: _OnePiece | _Pages
    if reservation == "paged":
        placement, memory = f"blocks of {block_size}", _Pages(slots, block_size)
    elif reservation in RESERVATIONS:
        memory = _OnePiece(Arena(slots, placement), reservation, trace.max_tokens)
    else:
        raise ValueError(f"there is no reservation {reservation!r}; choose one of {', '.join(RESERVATIONS)} or paged")
    for place, request in enumerate(trace.requests):
        if not memory.fits(request, request.total_tokens - 1):
            raise ValueError(f"request {place} never fits into {slots} slots with {reservation}, {placement}: {request}")
    run = _Run(trace, slots, memory, snapshots)
    while (run.waiting or run.running or run.coming) if ticks is None else run.tick < ticks:
        run.step()
    return run.result(reservation, placement)


class _Run:
    def __init__(self, trace: Trace, slots: int, memory: _OnePiece | _Pages, snapshots: int) -> None:
        self.trace, self.requests, self.slots, self.memory = trace, trace.requests, slots, memory
        self.coming, self.waiting = deque(range(len(trace.requests))), deque[int]()
        self.running: dict[int, int] = {}  # request -> tokens that it holds, in the order of admission
        self.left_off: dict[int, int] = {}  # preempted request -> tokens that it must compute anew
        self.tick = self.finished = self.preemptions = self.recomputed_tokens = 0
        self.waited: set[int] = set()
        self.refused_by_holes: set[int] = set()
        self.usage: list[Usage] = []
        self.crowds: list[tuple[int, bool]] = []  # requests that run, and whether somebody waits, at every tick
        self.snapshots, self.keep = list[Snapshot](), snapshots

    def step(self) -> None:
        for name in [name for name, tokens in self.running.items() if tokens == self.requests[name].total_tokens]:
            self._leave(name)
            self.finished += 1
            self._note(f"request {name} leaves")
        for name in list(self.running):
            self._write(name)
        while self.coming and self.requests[self.coming[0]].arrival <= self.tick:
            self.waiting.append(self.coming.popleft())
        self._admit()
        self.usage.append(self._measure())
        self.crowds.append((len(self.running), bool(self.waiting)))
        self.tick += 1

    def _admit(self) -> None:
        while self.waiting:
            name = self.waiting[0]
            request, tokens = self.requests[name], self.left_off.get(name, self.requests[name].prompt_tokens)
            wanted, moved = self.memory.wanted(request, tokens), self.memory.moved_tokens
            if not self.memory.fits(request, tokens):
                holes = wanted <= self.memory.free_slots
                if name not in self.waited or (holes and name not in self.refused_by_holes):
                    self._note(f"request {name} waits for {wanted} slots" + (": enough are free, but not in one piece" if holes else ""))
                self.waited.add(name)
                if holes:
                    self.refused_by_holes.add(name)
                return
            self.waiting.popleft()
            self.memory.admit(name, request, tokens + 1)
            self.running[name] = tokens + 1
            if name in self.left_off:
                self.recomputed_tokens += self.left_off.pop(name)
            moved = self.memory.moved_tokens - moved
            others = f"; {moved} tokens of others move" if moved else ""
            self._note(f"request {name} takes {wanted} slots for {tokens} + 1 tokens{others}")

    def _write(self, name: int) -> None:
        while name in self.running:
            if self.memory.write(name):
                self.running[name] += 1
                return
            last = next(reversed(self.running))  # it may be the one that wants to write
            self.left_off[last] = self.running[last]
            self._leave(last)
            self.waiting.appendleft(last)
            self.preemptions += 1
            self._note(f"request {last} is preempted: request {name} needs a block")

    def _leave(self, name: int) -> None:
        self.memory.leave(name)
        del self.running[name]

    def _measure(self) -> Usage:
        held = reserved = internal = rounding = 0
        for name, tokens in self.running.items():
            asked, given = self.memory.sizes(name)
            useful = min(asked, self.requests[name].total_tokens)  # slots that are written before it leaves
            held += tokens
            reserved += useful - tokens
            internal += asked - useful
            rounding += given - asked
        return Usage(held, reserved, internal, rounding, self.slots - held - reserved - internal - rounding)

    def _note(self, event: str) -> None:
        if len(self.snapshots) < self.keep:
            self.snapshots.append(Snapshot(self.tick, event, tuple(self.memory.segments()), len(self.waiting)))

    def result(self, reservation: str, placement: str) -> Result:
        busy = [tick for tick, (count, _) in enumerate(self.crowds) if count] or list(range(self.tick))
        ticks = [tick for tick, (_, somebody_waits) in enumerate(self.crowds) if somebody_waits] or busy
        scale = 1 / len(ticks)
        slot_ticks = (sum(part) for part in zip(*(self.usage[t] for t in ticks), strict=True))
        held, reserved, internal, rounding, free = (scale * part / self.slots for part in slot_ticks)
        requests = [self.crowds[t][0] for t in ticks]
        return Result(
            reservation=reservation,
            placement=placement,
            slots=self.slots,
            held=held,
            reserved=reserved,
            internal=internal,
            rounding=rounding,
            free=free,
            duplicate=scale * sum(max(count - 1, 0) for count in requests) * self.trace.shared_prefix_tokens / self.slots,
            mean_requests=scale * sum(requests),
            finished=self.finished,
            waited=len(self.waited),
            refused_by_holes=len(self.refused_by_holes),
            moved_tokens=self.memory.moved_tokens,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            usage=tuple(self.usage),
            snapshots=tuple(self.snapshots),
        )


def compare(trace: Trace | None = None, slots: int = PAPER_SLOTS, *, block_size: int = 16, ticks: int | None = None) -> list[Result]:
    """Every reservation with every placement, and pages, on one trace (``chats()``), for as long as requests arrive."""
    trace = chats() if trace is None else trace
    ticks = trace.requests[-1].arrival + 1 if ticks is None else ticks
    ways = [(reservation, placement) for reservation in RESERVATIONS for placement in PLACEMENTS]
    results = [simulate(trace, slots, *way, ticks=ticks, snapshots=0) for way in ways]
    return [*results, simulate(trace, slots, "paged", block_size=block_size, ticks=ticks, snapshots=0)]


def table(results: Sequence[Result]) -> str:
    """The results as lines of text, shares in percent of the memory (``copies``: of the duplicate prefix).

    No line is wider than a notebook's page (110 characters).
    """
    head = ("held", "reserved", "internal", "external", "copies", "requests", "finished", "by holes", "moved", "preempted")
    widths = (6, 9, 9, 9, 7, 9, 9, 9, 9, 10)
    rows: list[tuple[str, tuple[str, ...]]] = [("", head)]
    for r in results:
        shares = [f"{100 * share:.1f}" for share in (r.held, r.reserved, r.internal, r.external, r.duplicate)]
        counts = [f"{count:,}" for count in (r.finished, r.refused_by_holes, r.moved_tokens, r.preemptions)]
        rows.append((r.name, (*shares, f"{r.mean_requests:.1f}", *counts)))
    return "\n".join(f"{name:24}" + "".join(f"{word:>{width}}" for word, width in zip(row, widths, strict=True)) for name, row in rows)
