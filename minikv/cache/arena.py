"""Contiguous KV memory, as engines had it before paging: a car park in which a request takes neighbouring slots.

One slot holds one token. A sequence that must lie in one piece leaves two choices, and both waste memory:

    how much to reserve    ``maximum``, ``power_of_two``, ``oracle``: nobody knows how long an answer will be
    where to put it        ``first_fit``, ``best_fit``, ``buddy``, ``compaction``: the holes are where others left

    |AAAAAAaaaaa.....|BBBbb|        |CCCCCCCCccc|    |
     held  |    |            a hole               a hole: together wide enough for D, and D is refused
           |    never used: internal fragmentation
           written later: reserved

The reservations are the three Orca baselines of the PagedAttention paper (arXiv 2309.06180, section 6.1), which places
them with a buddy allocator. What the paper does about all this is in ``minikv.cache.blocks``.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple


def power_of_two_above(count: int) -> int:
    """The smallest power of two that is at least ``count``: 25 -> 32, 32 -> 32."""
    return 1 << (count - 1).bit_length()


def maximum(prompt_tokens: int, output_tokens: int, max_tokens: int) -> int:
    """Slots for the longest sequence that the model can do, whatever comes: Orca (Max)."""
    return max_tokens


def power_of_two(prompt_tokens: int, output_tokens: int, max_tokens: int) -> int:
    """Slots for the prompt, and for the output at most twice what it will need: Orca (Pow2).

    The output's share is the true output length, rounded up to a power of two (the paper's example: 25 tokens, 32
    slots). That we never reserve more than ``max_tokens`` is our addition.
    """
    return min(prompt_tokens + power_of_two_above(output_tokens), max_tokens)


def oracle(prompt_tokens: int, output_tokens: int, max_tokens: int) -> int:
    """Exactly the slots that the request will fill, which nobody can know beforehand: Orca (Oracle)."""
    return prompt_tokens + output_tokens


RESERVATIONS: dict[str, Callable[[int, int, int], int]] = {"maximum": maximum, "power_of_two": power_of_two, "oracle": oracle}
PLACEMENTS = ("first_fit", "best_fit", "buddy", "compaction")


class Segment(NamedTuple):
    """A piece of memory: ``length`` slots from slot ``start``, the first ``tokens`` of them written. No owner: a hole."""

    owner: Hashable | None
    start: int
    length: int
    tokens: int = 0


@dataclass(slots=True)
class _Allocation:
    start: int
    length: int
    tokens: int = 0


class Arena:
    """``slots`` slots in a row, given out in one piece per owner.

    ``placement`` says which hole an owner gets; among equals it is the one with the lowest address.

    - ``first_fit``: the first that is large enough.
    - ``best_fit``: the smallest that is large enough.
    - ``buddy``: sizes are rounded up to a power of two, and a larger piece is halved until it fits. A freed piece merges
      only with its buddy, the other half of what was once halved. A memory whose size is no power of two begins as
      several pieces that never merge, one for each bit of its size: 12 slots are 8 and 4, and 8 is the longest allocation.
    - ``compaction``: first fit; when no hole is large enough but all together are, the allocations are first moved
      together towards slot 0. ``moved_tokens`` counts the written tokens that had to be copied. Whoever holds the content
      is told by ``on_move(owner, old_start, new_start, tokens)``, once per piece and in address order: it only ever moves
      down, so a copy that runs upwards overwrites nothing that is still needed.
    """

    def __init__(self, slots: int, placement: str = "first_fit") -> None:
        if slots < 1:
            raise ValueError(f"a memory needs at least one slot, not {slots}")
        if placement not in PLACEMENTS:
            raise ValueError(f"there is no placement {placement!r}; choose one of {', '.join(PLACEMENTS)}")
        self.slots, self.placement = slots, placement
        self.free_slots = slots
        self.compactions = self.moved_tokens = 0
        self.on_move: Callable[[Hashable, int, int, int], None] = lambda owner, old_start, new_start, tokens: None
        self._live: dict[Hashable, _Allocation] = {}
        self._holes = self._whole()  # (start, length) in address order

    def _whole(self) -> list[tuple[int, int]]:
        if self.placement != "buddy":
            return [(0, self.slots)]
        bits = [1 << bit for bit in reversed(range(self.slots.bit_length())) if self.slots >> bit & 1]
        return [(sum(bits[:place]), size) for place, size in enumerate(bits)]

    # ---------------------------------------------------------------- asking

    @property
    def largest_hole(self) -> int:
        """Slots of the largest piece that can be given out as it is. Buddies of different parents do not add up."""
        return max((length for _, length in self._holes), default=0)

    def holes(self) -> list[Segment]:
        """The free pieces in address order."""
        return [Segment(None, start, length) for start, length in self._holes]

    def segments(self) -> list[Segment]:
        """The whole memory in address order, owners and holes: what a picture of it draws."""
        owned = [Segment(owner, piece.start, piece.length, piece.tokens) for owner, piece in self._live.items()]
        return sorted(owned + self.holes(), key=lambda segment: segment.start)

    def segment(self, owner: Hashable) -> Segment:
        """The piece that ``owner`` has now (compaction may have moved it). ValueError when it has none."""
        piece = self._find(owner)
        return Segment(owner, piece.start, piece.length, piece.tokens)

    def rounded(self, slots: int) -> int:
        """Slots that a request for ``slots`` takes: more than it asked for only with buddies."""
        return power_of_two_above(slots) if self.placement == "buddy" else slots

    def can_allocate(self, slots: int) -> bool:
        """True when ``allocate`` would serve a request for ``slots`` slots now."""
        return self.rounded(slots) <= (self.free_slots if self.placement == "compaction" else self.largest_hole)

    # ---------------------------------------------------------------- changing

    def allocate(self, owner: Hashable, slots: int) -> int:
        """Give ``owner`` ``slots`` neighbouring slots and return the first.

        MemoryError, with nothing changed, when no hole is large enough.
        """
        if owner is None or owner in self._live:
            raise ValueError(f"{owner!r} cannot be given slots: an owner is not None and owns one piece")
        if slots < 1:
            raise ValueError(f"{owner!r} must ask for at least one slot, not {slots}")
        if not self.can_allocate(slots):
            raise MemoryError(self._refusal(owner, slots))
        length = self.rounded(slots)
        if length > self.largest_hole:
            self._compact()
        start, hole = self._choose(length)
        self._holes.remove((start, hole))
        for piece in self._leftover(start, length, hole):
            bisect.insort(self._holes, piece)
        self._live[owner] = _Allocation(start, length)
        self.free_slots -= length
        return start

    def write(self, owner: Hashable, tokens: int = 1) -> None:
        """Fill the next ``tokens`` slots of ``owner``. ValueError, with nothing written, when they reach past its end."""
        piece = self._find(owner)
        if not 0 <= tokens <= piece.length - piece.tokens:
            raise ValueError(f"{owner!r} cannot write {tokens} tokens: {piece.tokens} of its {piece.length} slots are written")
        piece.tokens += tokens

    def free(self, owner: Hashable) -> None:
        """Take back all that ``owner`` has, and merge the hole with its neighbours (or its buddy). ValueError when it has nothing."""
        piece = self._find(owner)
        del self._live[owner]
        self.free_slots += piece.length
        start, length = piece.start, piece.length
        while neighbour := self._mergeable(start, length):
            self._holes.remove(neighbour)
            start, length = min(start, neighbour[0]), length + neighbour[1]
        bisect.insort(self._holes, (start, length))

    # ---------------------------------------------------------------- how

    def _find(self, owner: Hashable) -> _Allocation:
        if owner not in self._live:
            raise ValueError(f"{owner!r} owns nothing here")
        return self._live[owner]

    def _refusal(self, owner: Hashable, slots: int) -> str:
        rounded = f" (rounded up to {self.rounded(slots)})" if self.rounded(slots) != slots else ""
        state = f"{self.free_slots} of {self.slots} are free in total and the largest hole has {self.largest_hole}"
        return f"{owner!r} wants {slots} slots in one piece{rounded}, but {state}"

    def _choose(self, length: int) -> tuple[int, int]:
        fitting = [hole for hole in self._holes if hole[1] >= length]
        return min(fitting, key=lambda hole: hole[1]) if self.placement in ("best_fit", "buddy") else fitting[0]

    def _leftover(self, start: int, length: int, hole: int) -> list[tuple[int, int]]:
        """What is left of a hole of ``hole`` slots: its rest, or one buddy for every time that it was halved."""
        if self.placement != "buddy":
            return [(start + length, hole - length)] if hole > length else []
        halves = []
        while hole > length:
            hole //= 2
            halves.append((start + hole, hole))
        return halves

    def _mergeable(self, start: int, length: int) -> tuple[int, int] | None:
        """A hole that forms one piece with the slots from ``start`` on."""
        if self.placement == "buddy":  # every piece starts at a multiple of its size, so its buddy differs in one bit
            buddy = (start ^ length, length)
            return buddy if buddy in self._holes else None
        return next((hole for hole in self._holes if hole[0] + hole[1] == start or hole[0] == start + length), None)

    def _compact(self) -> None:
        end = 0
        for owner, piece in sorted(self._live.items(), key=lambda item: item[1].start):
            if piece.start != end and piece.tokens:
                self.moved_tokens += piece.tokens
                self.on_move(owner, piece.start, end, piece.tokens)
            piece.start = end
            end += piece.length
        self._holes = [(end, self.slots - end)]
        self.compactions += 1

    def check_integrity(self) -> None:
        """AssertionError unless every slot is in exactly one piece and no two holes lie apart that belong together."""
        segments, end = self.segments(), 0
        for segment in segments:
            assert segment.start == end, f"slots {end} to {segment.start} overlap or belong to nobody"
            assert 0 <= segment.tokens <= segment.length > 0, f"{segment.tokens} tokens in {segment.length} slots"
            end += segment.length
            if self.placement == "buddy":
                assert segment.length == power_of_two_above(segment.length), f"a piece of {segment.length} slots among buddies"
                assert segment.start % segment.length == 0, f"{segment.length} slots at {segment.start}: not aligned"
        assert end == self.slots, f"the pieces end at slot {end} of {self.slots}"
        assert self._holes == sorted(self._holes), f"the holes are not in address order: {self._holes}"
        free = sum(length for _, length in self._holes)
        assert free == self.free_slots, f"{self.free_slots} slots are said to be free, {free} are"
        for hole in self._holes:
            assert not self._mergeable(*hole), f"two holes that belong together: {hole} and {self._mergeable(*hole)}"
