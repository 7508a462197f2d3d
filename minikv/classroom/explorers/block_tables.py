"""Chapter 5: block tables and the pool, side by side. What a sequence sees in order lies in memory in any order.

A scripted history of arrivals, growth and departures runs over the engine's own ``BlockPool`` and ``BlockTable``. Above,
each sequence as it sees itself: its tokens in order. Below, the pool: the same tokens in the blocks that happened to be
free. An owned slot without a token is hatched. One token is looked up, so that the way through the table can be followed.
"""

from __future__ import annotations

import re
from typing import Any

from minikv.cache.blocks import BlockPool, BlockTable, blocks_for
from minikv.show.widgets import Picture, Slider, Text

SLOTS = 48
ROW_SLOTS = 24  # the pool is drawn in rows of so many slots; every block size divides it
BLOCK_SIZES = (1, 2, 3, 4, 6, 8, 12)
# (sequence, tokens that it has from now on; 0: it leaves)
HISTORY = (
    ("A", 6), ("B", 9), ("C", 3), ("A", 10), ("B", 11), ("C", 7), ("B", 0), ("D", 14), ("A", 13), ("C", 0), ("E", 10), ("D", 18),
)  # fmt: skip
SHADES = {"A": "#f2f2f2", "B": "#cfcfcf", "C": "#e0e0e0", "D": "#b4b4b4", "E": "#d8d8d8"}

CONTROLS = {
    "events": Slider("Events so far", tuple(range(len(HISTORY) + 1)), 8),
    "block_size": Slider("Slots in a block", BLOCK_SIZES, 4),
    "token": Text("Look up", "D 9"),
}


class Park:
    """The pool and the tables after the first ``events`` of the history. A sequence that finds no block waits, unchanged."""

    def __init__(self, events: int, block_size: int) -> None:
        self.pool = BlockPool(SLOTS // block_size, block_size)
        self.tables: dict[str, BlockTable] = {}
        self.left: set[str] = set()
        self.said = "nothing has happened yet"
        for name, tokens in HISTORY[:events]:
            self.said = self._event(name, tokens)

    def _event(self, name: str, tokens: int) -> str:
        if tokens == 0:
            self.left.add(name)
            table = self.tables.pop(name, None)
            if table is None:
                return f"{name} gives up: it never got a block"
            self.pool.release(reversed(table.blocks))
            return f"{name} leaves and gives back {_count(len(table), 'block')}"
        table = self.tables.get(name) or BlockTable(self.pool.block_size)
        missing = blocks_for(tokens, table.block_size) - len(table)
        if missing > self.pool.num_free:
            return f"{name} wants {_count(missing, 'block')} more for {tokens} tokens, but {self.pool.num_free} are free: it must wait"
        table.blocks.extend(self.pool.allocate_many(missing))
        verb = "grows to" if name in self.tables else "arrives with"
        table.num_tokens, self.tables[name] = tokens, table
        return f"{name} {verb} {tokens} tokens and takes {_count(missing, 'block') if missing else 'no block'}"

    @property
    def owned_blocks(self) -> int:
        return sum(len(table) for table in self.tables.values())

    @property
    def empty_slots(self) -> int:
        """Owned, without a token: all the waste that paging leaves."""
        return sum(table.capacity_tokens - table.num_tokens for table in self.tables.values())


def draw(events: int, block_size: int, token: str) -> Picture:
    """The picture after ``events`` of the history. ValueError when ``token`` does not name a sequence and a position."""
    name, position = _parse(token)
    park = Park(events, block_size)
    park.pool.check_integrity(park.tables.values())
    tokens = sum(table.num_tokens for table in park.tables.values())
    what = f"Event {events}: {park.said}." if events else "Event 0: nothing has happened yet."
    summary = (
        f"{what} Now {tokens} tokens lie in {park.owned_blocks} of {_count(park.pool.num_blocks, 'block')}; "
        f"{_count(park.empty_slots, 'owned slot')} {'is' if park.empty_slots == 1 else 'are'} empty, "
        f"{_count(park.pool.num_free, 'block')} free. {_looked_up(park, name, position)}"
    )
    return Picture(_figure(park, name, position), summary)


def _parse(token: str) -> tuple[str, int]:
    found = re.fullmatch(r"\s*([A-Ea-e])\s*(\d{1,4})\s*", token)
    if not found:
        raise ValueError(f"{token!r} names no token: write a sequence from A to E and a position, such as D 9")
    return found[1].upper(), int(found[2])


def _looked_up(park: Park, name: str, position: int) -> str:
    if name not in park.tables:
        return f"{name} {'has left' if name in park.left else 'is not there yet'}, so there is no {name}{position} to look up."
    table = park.tables[name]
    if position >= table.num_tokens:
        return f"{name} has {table.num_tokens} tokens so far, positions 0 to {table.num_tokens - 1}: there is no {name}{position}."
    block, slot = table.locate(position)
    return (
        f"{name}{position}: {position} // {table.block_size} = {position // table.block_size}, {position} % {table.block_size} = {slot}; "
        f"entry {position // table.block_size} of {name}'s table is {block}, so it lies in block {block}, slot {slot}."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _figure(park: Park, name: str, position: int) -> Any:
    from matplotlib.figure import Figure

    size = park.pool.block_size
    rows = SLOTS // ROW_SLOTS
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    logical, physical = figure.subplots(2, 1, height_ratios=(5, 2 * rows + 0.6))
    for axis, height in ((logical, 5), (physical, 2 * rows + 0.6)):
        axis.set_xlim(-1.6, ROW_SLOTS + 0.1)
        axis.set_ylim(height, -0.1)
        axis.axis("off")
    logical.set_title("Logical: each sequence in its own order (the numbers above a row are its block table)", loc="left", fontsize=9)
    physical.set_title("Physical: the pool, block by block (hatched: owned but empty; white: free)", loc="left", fontsize=9)
    for row, (owner, table) in enumerate(sorted(park.tables.items())):
        top = 1.25 * row + 0.45
        logical.text(-0.5, top + 0.4, owner, ha="right", va="center", fontsize=10, weight="bold")
        for place, block in enumerate(table.blocks):
            logical.text(place * size + size / 2, top - 0.08, str(block), ha="center", va="bottom", fontsize=7)
            for slot in range(size):
                here = place * size + slot
                filled = here < table.num_tokens
                _cell(logical, here, top, owner if filled else None, str(here), filled and (owner, here) == (name, position))
            _border(logical, place * size, top, size)
    owners = {block: (owner, place) for owner, table in park.tables.items() for place, block in enumerate(table.blocks)}
    for block in range(park.pool.num_blocks):
        left, top = block * size % ROW_SLOTS, 1.75 * (block * size // ROW_SLOTS) + 0.6
        physical.text(left + size / 2, top - 0.08, str(block), ha="center", va="bottom", fontsize=7)
        if block in owners:
            owner, place = owners[block]
            for slot in range(size):
                here = place * size + slot
                filled = here < park.tables[owner].num_tokens
                found = filled and (owner, here) == (name, position)
                _cell(physical, left + slot, top, owner if filled else None, f"{owner}{here}", found)
        _border(physical, left, top, size)
    physical.text(-0.2, 0.52, "block", ha="right", va="bottom", fontsize=7)
    return figure


def _cell(axis: Any, left: float, top: float, owner: str | None, label: str, found: bool) -> None:
    """One slot of a block that has an owner; without a token it is hatched."""
    from matplotlib.patches import Rectangle

    if owner is None:
        axis.add_patch(Rectangle((left, top), 1, 0.8, facecolor="white", edgecolor="#767676", hatch="/////", linewidth=0.4))
        return
    face = "#1f1f1f" if found else SHADES[owner]
    axis.add_patch(Rectangle((left, top), 1, 0.8, facecolor=face, edgecolor="#767676", linewidth=0.4))
    axis.text(left + 0.5, top + 0.4, label, ha="center", va="center", fontsize=7.5, color="white" if found else "#1f1f1f")


def _border(axis: Any, left: float, top: float, size: int) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((left, top), size, 0.8, fill=False, edgecolor="#1f1f1f", linewidth=1.4))
