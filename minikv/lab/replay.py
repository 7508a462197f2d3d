"""A trace of real traffic, replayed through the prefix cache: what share of the blocks would have been found?

The trace does not hold anybody's text, only an id for each block of 512 tokens of each prompt; equal ids stand for equal
prefixes. That is all a prefix cache looks at. So the replay uses the engine's own cache, block pool and eviction
policies; the ids take the place of the keys. Requests come one after the other: when they came, and how long they ran,
does not matter to the order in which blocks are touched.

How much memory would be worth its price? The curve of hit rate against capacity says it, and Belady's policy, which
knows the future and evicts what will be needed last, says how much of the gap is the policy's fault.

Format: kvcache-ai/Mooncake, JSON lines {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [...]}.
"""

from __future__ import annotations

import gc
import heapq
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from minikv.cache.blocks import BlockPool, BlockTable, EvictionPolicy, FirstInFirstOut, LeastRecentlyUsed
from minikv.cache.prefix import KeyChain, PrefixCache
from minikv.errors import RequestError

BLOCK_TOKENS = 512
POLICIES = ("lru", "fifo", "optimal")


@dataclass(frozen=True)
class Replayed:
    """Blocks of all prompts, how many of them were found, and how many different ones there are."""

    blocks: int
    block_hits: int
    capacity_blocks: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        return self.block_hits / self.blocks if self.blocks else 0.0


def read_trace(path: str | Path, on_line: Callable[[int], None] = lambda size: None) -> list[list[int]]:
    """The block ids of each request, in order. ``on_line`` is told the bytes of each line read.

    RequestError that names the line: no JSON object, a key missing or of the wrong kind, a number of ids that does not
    match input_length, or an id that follows different ids in different places. Nothing of such a file is used.
    """
    requests: list[list[int]] = []
    parents: dict[int, int | None] = {}
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                on_line(len(line))
                if line.strip():
                    requests.append(_checked(line, parents, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as wrong:
        raise RequestError(f"{path} cannot be read as a trace: {wrong}") from None
    if not requests:
        raise RequestError(f"{path} holds no request")
    return requests


def _checked(line: str, parents: dict[int, int | None], where: str) -> list[int]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as wrong:
        raise RequestError(f"{where} is no JSON: {wrong}") from None
    if not isinstance(entry, dict):
        raise RequestError(f"{where} should be a JSON object, not a {type(entry).__name__}")
    length, ids = entry.get("input_length"), entry.get("hash_ids")
    if type(length) is not int or length < 1:
        raise RequestError(f"{where}: input_length should be a number of tokens of at least 1, not {length!r}")
    if not isinstance(ids, list) or any(type(each) is not int or not -(2**127) <= each < 2**127 for each in ids):
        raise RequestError(f"{where}: hash_ids should be a list of whole numbers of at most 128 bits")
    needed = -(-length // BLOCK_TOKENS)
    if len(ids) != needed:
        raise RequestError(f"{where}: {length} tokens are {needed} blocks of {BLOCK_TOKENS}, and there are {len(ids)} hash_ids")
    if len(set(ids)) != len(ids):
        raise RequestError(f"{where}: a prompt names a block twice; equal ids stand for equal prefixes")
    for parent, each in zip([None, *ids], ids, strict=False):
        if parents.setdefault(each, parent) != parent:
            raise RequestError(
                f"{where}: id {each} follows {parent}, and before it followed {parents[each]}; equal ids stand for equal prefixes"
            )
    return ids


def replay(
    requests: Sequence[Sequence[int]],
    capacity_tokens: int | None = None,
    policy: str = "lru",
    on_request: Callable[[], None] = lambda: None,
) -> Replayed:
    """Replay the block ids of ``requests`` through a cache of ``capacity_tokens`` (None: unlimited).

    ``policy`` is "lru", "fifo" or "optimal" (Belady). Of a prompt longer than the cache, the part that fits is kept
    while it is served. RequestError for an unknown policy or a capacity of less than one block.
    """
    distinct = len(set().union(*requests))
    capacity = distinct if capacity_tokens is None else min(capacity_tokens // BLOCK_TOKENS, distinct)
    if capacity < 1:
        raise RequestError(f"a cache of {capacity_tokens} tokens holds no block of {BLOCK_TOKENS}")
    eviction = _policy(policy, requests)
    pool = BlockPool(capacity, BLOCK_TOKENS, eviction)
    cache, chain = PrefixCache(pool), KeyChain(b"trace", BLOCK_TOKENS)
    blocks = hits = 0
    collecting = gc.isenabled()
    gc.disable()  # looking for garbage among so many entries takes a fifth of the time, and there is none before the end
    try:
        for ids in requests:
            if isinstance(eviction, Belady):
                eviction.next_request(ids)
            blocks += len(ids)
            hits += _serve(ids[:capacity], chain, pool, cache, eviction)
            on_request()
        return Replayed(blocks, hits, capacity, pool.evictions)
    finally:
        if collecting:
            gc.enable()


def _serve(ids: Sequence[int], chain: KeyChain, pool: BlockPool, cache: PrefixCache, eviction: EvictionPolicy) -> int:
    """One request: share what is found, take blocks for the rest, make them findable, let all go. Returns the hits."""
    chain.keys = chain.chunks = cast(list[bytes], ids)  # an id stands for the whole prefix already: nothing to hash
    found = cache.lookup(chain, most=len(ids))
    chain.linked = found[-1] if found else None
    blocks = [entry.block for entry in found]
    pool.share(blocks)
    blocks += pool.allocate_many(len(ids) - len(found))
    table = BlockTable(BLOCK_TOKENS)
    table.blocks = cast("array[int]", blocks)  # no step copies this table, and a list is quicker to fill
    table.num_tokens = table.capacity_tokens
    cache.publish(chain, table, len(found))
    if isinstance(eviction, Belady):
        eviction.holds(blocks, ids)
    pool.release(reversed(blocks))
    return len(found)


def _policy(name: str, requests: Sequence[Sequence[int]]) -> EvictionPolicy:
    if name == "lru":
        return LeastRecentlyUsed()
    if name == "fifo":
        return FirstInFirstOut()
    if name == "optimal":
        return Belady(requests)
    raise RequestError(f"unknown policy {name!r}; known are {', '.join(POLICIES)}")


class Belady:
    """Evicts the block whose next use lies farthest ahead: the best that any policy can do, and possible only in a replay.

    L. A. Belady, 1966. A block is never needed before the block that it is chained to, so ties go to the one deeper in
    its chain, and a chain loses its tail first.
    """

    NEVER = 1 << 60

    def __init__(self, requests: Sequence[Sequence[int]]) -> None:
        self._uses: dict[int, list[int]] = {}  # of each id: the requests that use it, the next one last
        for number in range(len(requests) - 1, -1, -1):
            for each in requests[number]:
                self._uses.setdefault(each, []).append(number)
        self._ids: dict[int, tuple[int, int]] = {}  # block -> its id and depth
        self._heap: list[tuple[int, int, int, int]] = []  # (-next use, -depth, block, ticket); old tickets are void
        self._tickets: dict[int, int] = {}
        self._count = 0

    def next_request(self, ids: Sequence[int]) -> None:
        """The request with these ids is served now: what comes next is behind it."""
        for each in ids:
            self._uses[each].pop()

    def holds(self, blocks: Sequence[int], ids: Sequence[int]) -> None:
        """These blocks hold these ids."""
        for depth, (block, each) in enumerate(zip(blocks, ids, strict=True)):
            self._ids[block] = (each, depth)

    def keep(self, blocks: Sequence[int]) -> None:
        """Their ids are told by ``holds``."""

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            each, depth = self._ids[block]
            uses = self._uses[each]
            self._count += 1
            self._tickets[block] = self._count
            heapq.heappush(self._heap, (-(uses[-1] if uses else self.NEVER), -depth, block, self._count))

    def remove(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._tickets[block]

    def choose(self) -> int:
        while True:
            _, _, block, ticket = heapq.heappop(self._heap)
            if self._tickets.get(block) == ticket:
                del self._tickets[block]
                return block

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, block: object) -> bool:
        return block in self._tickets


def capacity_curve(
    requests: Sequence[Sequence[int]],
    policies: Sequence[str] = POLICIES,
    points: int = 12,
    on_request: Callable[[], None] = lambda: None,
) -> dict[str, list[tuple[int, float]]]:
    """(capacity in tokens, hit rate) for each policy, at ``points`` capacities from a thousandth of all blocks to all."""
    distinct = len({each for ids in requests for each in ids})
    sizes = sorted({max(1, round(distinct * 10 ** (-3 + 3 * i / (points - 1)))) for i in range(points)})
    return {
        policy: [(size * BLOCK_TOKENS, replay(requests, size * BLOCK_TOKENS, policy, on_request).hit_rate) for size in sizes]
        for policy in policies
    }
