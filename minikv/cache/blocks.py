"""Blocks and the table that strings them together: bookkeeping without a tensor in sight.

KV memory is cut into blocks of ``block_size`` slots, one slot for one token. A sequence owns a *block table*, the list
of its blocks in order: the token at position p lies in slot ``p % block_size`` of block ``table[p // block_size]``.
Blocks are all alike, so any free one will do, and at most one block per sequence is partly empty. That is the whole
cure for fragmentation.

Every block is in exactly one place:

    free ----allocate----> owned (references >= 1) ----release, last owner----> cached, if its content has a key
     ^                       ^                                  \\                |   ^ evictable; a hit revives it
     |                       +------------- share --------------|---------------+
     +------------- release, last owner, no key ----------------+   <--evict-- when no block is free

A cached block is as good as free: ``allocate`` takes free blocks first and then evicts cached ones, in the order that
an eviction policy chooses.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens: the quotient, rounded up."""
    return -(-tokens // block_size)


class BlockTable:
    """The blocks of one sequence, in order, and how many of their slots are filled.

    The numbers are kept as int32 in one flat piece of memory, so that a step copies a table instead of walking it.
    """

    __slots__ = ("block_size", "blocks", "num_tokens")

    def __init__(self, block_size: int) -> None:
        self.blocks: array[int] = array("i")
        self.block_size = block_size
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the blocks that the table has now."""
        return len(self.blocks) * self.block_size

    @property
    def last_block_tokens(self) -> int:
        """Filled slots of the last block that holds any: 0 only for an empty table, ``block_size`` when it is full."""
        if self.num_tokens == 0:
            return 0
        return (self.num_tokens - 1) % self.block_size + 1

    @property
    def last_block_is_full(self) -> bool:
        """True when every slot up to the last filled block's end is taken (also for an empty table)."""
        return self.num_tokens % self.block_size == 0

    def locate(self, position: int) -> tuple[int, int]:
        """Block number and slot of the token at ``position``. IndexError when the table has no block for it."""
        if not 0 <= position < self.capacity_tokens:
            raise IndexError(f"position {position} lies outside the {self.capacity_tokens} slots of this table")
        return self.blocks[position // self.block_size], position % self.block_size


class EvictionPolicy(Protocol):
    """Chooses which cached block goes next. The pool tells it of every block that becomes or stops being evictable.

    It tells of a whole prompt's blocks at once: a call for each block would cost more than what the call does.
    """

    def keep(self, blocks: Sequence[int]) -> None:
        """``blocks`` hold new content that can be found. They still have owners."""
        ...

    def add(self, blocks: Sequence[int]) -> None:
        """``blocks`` lost their last owners, in this order, and may be evicted from now on."""
        ...

    def remove(self, blocks: Sequence[int]) -> None:
        """``blocks`` are wanted again (or their content was dropped); they are not evictable any more."""
        ...

    def choose(self) -> int:
        """Take out and return the block to give up. Only called when there is one."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class LeastRecentlyUsed:
    """Gives up the block that lost its last owner the longest ago.

    A sequence lets go of its blocks from the tail to the head (see ``BlockPool.release``), so that the tail of a
    chain goes before its head: a head without a tail is still a hit, a tail without its head is garbage.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def keep(self, blocks: Sequence[int]) -> None:
        """How old a content is does not matter here."""

    def add(self, blocks: Sequence[int]) -> None:
        order = self._order
        for block in blocks:
            order[block] = None

    def remove(self, blocks: Sequence[int]) -> None:
        order = self._order
        for block in blocks:
            del order[block]

    def choose(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: object) -> bool:
        return block in self._order


class FirstInFirstOut:
    """Gives up the content that was computed the longest ago, however often it was used since.

    The heads of chains are the oldest, and a head takes its tail along: worse than LRU, and here to show by how much.
    """

    def __init__(self) -> None:
        self._age: dict[int, int] = {}
        self._count = 0
        self._evictable: set[int] = set()
        self._heap: list[tuple[int, int]] = []  # (age, block); void when not evictable, or of another age by now
        self._queued: dict[int, int] = {}  # the age with which a block stands in the heap, so that it stands there once

    def keep(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._count += 1
            self._age[block] = self._count

    def add(self, blocks: Sequence[int]) -> None:
        self._evictable.update(blocks)
        for block in blocks:
            age = self._age[block]
            if self._queued.get(block) != age:
                self._queued[block] = age
                heapq.heappush(self._heap, (age, block))

    def remove(self, blocks: Sequence[int]) -> None:
        self._evictable.difference_update(blocks)

    def choose(self) -> int:
        while True:
            age, block = heapq.heappop(self._heap)
            if self._queued.get(block) == age:
                del self._queued[block]
            if block in self._evictable and self._age[block] == age:
                self._evictable.remove(block)
                return block

    def __len__(self) -> int:
        return len(self._evictable)

    def __contains__(self, block: object) -> bool:
        return block in self._evictable


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` slots: who owns which, and which may be taken.

    The pool does not know what a key is. Whoever caches content (the prefix cache) marks a block with ``keep`` and is
    told through ``on_evict`` when the block is given to somebody else.
    """

    def __init__(self, num_blocks: int, block_size: int, eviction: EvictionPolicy | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of at least one slot; got num_blocks={num_blocks}, block_size={block_size}")
        if eviction is not None and len(eviction):
            raise ValueError(f"the eviction policy holds {len(eviction)} blocks of another pool: give each pool its own")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = [0] * num_blocks
        self.kept = [False] * num_blocks  # its content has a key: it must not be written to
        self.on_evict: Callable[[int], None] = lambda block: None
        self.evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is handed out first
        self._cached: EvictionPolicy = LeastRecentlyUsed() if eviction is None else eviction

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out: the free ones and the cached ones without an owner."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks whose content has a key and that nobody owns: evictable, or revived by a hit."""
        return len(self._cached)

    def is_evictable(self, block: int) -> bool:
        """True when nobody owns ``block``, so that a hit on it takes one away from ``num_free``."""
        return self.references[block] == 0

    def allocate(self) -> int:
        """One block with one owner and no key. MemoryError when none is free; ask ``num_free`` before."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """``count`` blocks with one owner and no key each, free ones before cached ones.

        MemoryError, with nothing taken, when there are fewer.
        """
        if count > self.num_free:
            raise MemoryError(f"{count} blocks are wanted, but of all {self.num_blocks} blocks only {self.num_free} have no owner")
        references, free = self.references, self._free
        blocks: list[int] = []
        for _ in range(count):
            block = free.pop() if free else self._evict()  # an eviction may free what was chained to the block
            references[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        """Take the content from the cached block that the policy gives up."""
        block = self._cached.choose()
        self.kept[block] = False
        self.evictions += 1
        self.on_evict(block)
        return block

    # The next four take all blocks of a prompt in one call, and undo what they did when one of the blocks is wrong. That
    # a number is not negative is checked in place: Python would take -1 for the last block.

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each block; all are owned or cached (prefix hits, a fork).

        ValueError, with nothing changed, when one of them is free.
        """
        references, kept, num_blocks = self.references, self.kept, self.num_blocks
        revived = []
        for place, block in enumerate(blocks):
            if block < 0 or block >= num_blocks or not (references[block] or kept[block]):
                for shared in blocks[:place]:
                    references[shared] -= 1
                raise ValueError(f"block {block} is free, or none of {num_blocks}: there is nothing in it to share")
            if not references[block]:
                revived.append(block)
            references[block] += 1
        self._cached.remove(revived)

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each block. Hand them over from a chain's tail to its head (see LeastRecentlyUsed).

        ValueError, with nothing changed, when one of them has no owner (or fewer than it is named).
        """
        blocks = tuple(blocks)
        references, kept, num_blocks = self.references, self.kept, self.num_blocks
        evictable: list[int] = []
        freed: list[int] = []
        for place, block in enumerate(blocks):
            if block < 0 or block >= num_blocks or not references[block]:
                for released in blocks[:place]:
                    references[released] += 1
                raise ValueError(f"block {block} has no owner and cannot be released; the pool has blocks 0 to {num_blocks - 1}")
            references[block] -= 1
            if not references[block]:
                (evictable if kept[block] else freed).append(block)
        self._cached.add(evictable)
        self._free.extend(freed)

    def keep(self, blocks: Sequence[int]) -> None:
        """The owned blocks' contents have keys now: from here on they are read-only, and cached when their owners go.

        ValueError, with nothing changed, when one of them has no owner, or a key already (or is named twice).
        """
        references, kept, num_blocks = self.references, self.kept, self.num_blocks
        for place, block in enumerate(blocks):
            if block < 0 or block >= num_blocks or kept[block] or not references[block]:
                for marked in blocks[:place]:
                    kept[marked] = False
                raise ValueError(f"block {block} cannot be kept: it has a key already, or no owner, or is none of {num_blocks}")
            kept[block] = True
        self._cached.keep(blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        """The blocks' contents lost their keys: with owners they stay theirs, without they are free.

        ValueError, with nothing changed, when one of them has no key (or is named twice).
        """
        references, kept, num_blocks = self.references, self.kept, self.num_blocks
        for place, block in enumerate(blocks):
            if block < 0 or block >= num_blocks or not kept[block]:
                for unmarked in blocks[:place]:
                    kept[unmarked] = True
                raise ValueError(f"block {block} has no key to forget, or is none of {num_blocks}")
            kept[block] = False
        ownerless = [block for block in blocks if not references[block]]
        self._cached.remove(ownerless)
        self._free.extend(ownerless)

    def writable(self, block: int) -> bool:
        """Only a block with one owner and no key may be written to: nobody else reads it."""
        return self.references[block] == 1 and not self.kept[block]

    def check_integrity(self, tables: Iterable[BlockTable] = ()) -> None:
        """AssertionError unless every block is in exactly one place and the owners are exactly ``tables``."""
        owners = [0] * self.num_blocks
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), f"a table names a block twice: {list(table.blocks)}"
            for block in table.blocks:
                owners[block] += 1
        assert owners == self.references, _first_difference("owners by the tables", owners, "references", self.references)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        cached = 0
        for block in range(self.num_blocks):
            places = (block in free) + (block in self._cached) + (self.references[block] > 0)
            assert places == 1, f"block {block} is in {places} places instead of one"
            cached += block in self._cached
            assert self.kept[block] or block not in self._cached, f"block {block} is cached without a key"
            assert not (self.kept[block] and block in free), f"block {block} has a key and is free"
        assert cached == len(self._cached), f"{len(self._cached)} blocks are said to be cached, {cached} are"


def _first_difference(left_name: str, left: list[int], right_name: str, right: list[int]) -> str:
    for block, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            return f"block {block}: {a} {left_name}, {b} {right_name}"
    return ""
