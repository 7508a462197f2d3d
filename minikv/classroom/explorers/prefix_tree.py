"""Chapter 6: the tree of prefixes. Which blocks a prompt finds, who owns them, and which would be given up next.

Two given prompts have been served and have left; then the reader's first prompt comes, and then the second. All are served by
the engine's own ``BlockPool`` and ``PrefixCache``, without a model: what is found depends on tokens alone. A box is a block with
the text of its tokens, and what hangs on it begins with all that stands before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import minikv.model.bundled
from minikv.cache.blocks import BlockPool, BlockTable, LeastRecentlyUsed, blocks_for
from minikv.cache.prefix import KeyChain, PrefixCache, namespace
from minikv.model.tokenizer import Tokenizer
from minikv.show.widgets import Choice, Picture, Slider, Text

GIVEN = ("You are a guide. What is the capital of France?", "You are a guide. What is the river of Rome?")
MOST_TOKENS = 24
BLOCK_SIZES = (1, 2, 3, 4, 6, 8)
POOL_SLOTS = (24, 36, 48, 96)  # the smallest holds one prompt of the longest and no more; every block size divides it
SPACE = namespace(content="bundled", salt=None)

CONTROLS = {
    "first": Text("First prompt", "You are a guide. What is the capital of Italy?"),
    "second": Text("Second prompt", "You are a guide. What is the capital of Italy in May?"),
    "first_is": Choice("The first", ("has ended", "still runs"), "still runs"),
    "block_size": Slider("Slots in a block", BLOCK_SIZES, 3),
    "pool_slots": Slider("Slots in the pool", POOL_SLOTS, 24),
}


@cache
def tokenizer() -> Tokenizer:
    """That of the bundled model, without its weights."""
    found = Tokenizer.from_folder(Path(minikv.model.bundled.__path__[0]))
    assert found is not None
    return found


class Watched(LeastRecentlyUsed):
    """LRU that lets one look at its order."""

    def oldest_first(self) -> list[int]:
        return list(self._order)


class Served:
    """A prompt that was looked up and, if there was room, given blocks. ``waits`` when there was none: nothing has moved then."""

    def __init__(self, prefix: PrefixCache, ids: list[int]) -> None:
        pool, size = prefix.pool, prefix.pool.block_size
        self.ids, self.chain, self.table = ids, KeyChain(SPACE, size), BlockTable(size)
        self.chain.extend(ids)
        cached = prefix.lookup(self.chain, most=len(self.chain.keys))
        self.hits = cached[: (len(ids) - 1) // size]  # one token is always computed
        self.held_back = len(cached) > len(self.hits)
        self.needed = blocks_for(len(ids), size) - len(self.hits)
        self.available = pool.num_free - sum(pool.is_evictable(hit.block) for hit in self.hits)
        self.waits = self.needed > self.available
        self.evicted = pool.evictions
        if not self.waits:
            self.table.blocks.extend([hit.block for hit in self.hits])
            pool.share(self.table.blocks)
            self.table.blocks.extend(pool.allocate_many(self.needed))
            self.table.num_tokens = len(ids)
            self.chain.linked = self.hits[-1] if self.hits else None
            prefix.publish(self.chain, self.table, len(self.hits))
        self.evicted = pool.evictions - self.evicted

    @property
    def found_tokens(self) -> int:
        return len(self.hits) * self.table.block_size


@dataclass(eq=False)
class Node:
    """A block of the tree, ``place`` blocks behind the start. A ``private`` one has no key: it is not full, or a second copy."""

    block: int
    place: int
    ids: list[int]
    found: bool = False
    private: bool = False
    row: int = 0
    children: list[Node] = field(default_factory=list)


class Tree:
    """What pool and cache hold after the given prompts, the first and the second one."""

    def __init__(self, first: str, second: str, first_is: str, block_size: int, pool_slots: int) -> None:
        mine = [_encode("first", first), _encode("second", second)]
        self.order = Watched()
        self.pool = BlockPool(pool_slots // block_size, block_size, self.order)
        self.prefix = PrefixCache(self.pool)
        self.given = [Served(self.prefix, tokenizer().encode(GIVEN[0]))]
        self.pool.release(reversed(self.given[0].table.blocks))
        self.given.append(Served(self.prefix, tokenizer().encode(GIVEN[1])))
        self.pool.release(reversed(self.given[1].table.blocks))
        self.first = Served(self.prefix, mine[0])
        self.running = []
        if first_is == "still runs":
            self.running.append(self.first)
        else:
            self.pool.release(reversed(self.first.table.blocks))
        self.second = Served(self.prefix, mine[1])
        if not self.second.waits:
            self.running.append(self.second)
        self.roots: list[Node] = []
        self.nodes: dict[int, Node] = {}
        self._grow()

    def _grow(self) -> None:
        """The tree of all blocks that can be found or have an owner; the second prompt's way comes first, along the top."""
        found = {hit.block for hit in self.second.hits}
        for one in (self.second, self.first, *self.given):
            way: list[Node] = []
            for entry in self.prefix.lookup(one.chain, most=len(one.chain.keys)):
                way.append(self._add(way, entry.block, len(way), one.ids, found=entry.block in found))
            if one in self.running and not self.pool.kept[one.table.blocks[-1]]:
                last = len(one.table) - 1
                self._add(way[:last], one.table.blocks[last], last, one.ids, private=True)
        rows = 0
        for root in self.roots:
            rows = _arrange(root, rows)
        self.rows = rows

    def _add(self, way: list[Node], block: int, place: int, ids: list[int], found: bool = False, private: bool = False) -> Node:
        """The node of ``block`` behind ``way``, new or known."""
        if block not in self.nodes:
            size = self.pool.block_size
            node = self.nodes[block] = Node(block, place, ids[place * size : (place + 1) * size], found, private)
            (way[-1].children if way else self.roots).append(node)
        return self.nodes[block]


def _arrange(node: Node, row: int) -> int:
    """Give ``node`` and what hangs on it their rows, from ``row`` on; returns the next free one."""
    node.row = row
    for child in node.children:
        row = _arrange(child, row)
    return row if node.children else row + 1


def draw(first: str, second: str, first_is: str, block_size: int, pool_slots: int) -> Picture:
    """The tree after all four prompts. ValueError for a prompt that is empty or too long."""
    tree = Tree(first, second, first_is, block_size, pool_slots)
    tree.pool.check_integrity(one.table for one in tree.running)
    tree.prefix.check_integrity()
    return Picture(_figure(tree), _summary(tree))


def _encode(name: str, text: str) -> list[int]:
    ids = tokenizer().encode(text)
    if not ids:
        raise ValueError(f"the {name} prompt is empty: type a few words, such as {GIVEN[0]}")
    if len(ids) > MOST_TOKENS:
        raise ValueError(f"the {name} prompt has {len(ids)} tokens and the picture has room for {MOST_TOKENS}: type a shorter one")
    return ids


def _text(ids: list[int]) -> str:
    return tokenizer().decode(ids)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _summary(tree: Tree) -> str:
    second = tree.second
    found, total, blocks = second.found_tokens, len(second.ids), len(second.hits)
    if second.waits:
        return (
            f"The second prompt has to wait. {found} of its {_count(total, 'token')} are cached, in {_count(blocks, 'block')}, but it "
            f"needs {_count(second.needed, 'block')} more, and besides those only {second.available} can be had."
        )
    held = " The last token of a prompt is always computed, so its last block is not taken from the cache." if second.held_back else ""
    evicted = f"{_count(second.evicted, 'cached block')} {'was' if second.evicted == 1 else 'were'} evicted"
    said = (
        f"Second prompt: {found} of {_count(total, 'token')} found in {_count(blocks, 'block')}; from {_text(second.ids[found:])!r} on "
        f"it is computed, into {_count(second.needed, 'new block')}, for which {evicted}.{held} "
    )
    waiting = tree.order.oldest_first()
    if not waiting:
        return said + "No cached block is without an owner: nothing could be given up now."
    return said + (
        f"{_count(len(waiting), 'cached block')} {'has' if len(waiting) == 1 else 'have'} no owner; "
        f"the first to be given up holds {_text(tree.nodes[waiting[0]].ids)!r}."
    )


WIDTH_IN, ROW_IN = 10.0, 0.72


def _figure(tree: Tree) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    size, second = tree.pool.block_size, tree.second
    inches_per_token = WIDTH_IN / (MOST_TOKENS + 1)
    figure = Figure(figsize=(WIDTH_IN, ROW_IN * tree.rows + 1.1), layout="constrained")
    axis = figure.subplots()
    axis.set_xlim(-0.3, MOST_TOKENS + 0.7)
    axis.set_ylim(tree.rows + 0.6, -0.95)
    axis.axis("off")
    place_out = {block: place for place, block in enumerate(tree.order.oldest_first(), 1)}
    for node in tree.nodes.values():
        left = node.place * size
        for child in node.children:
            axis.plot(
                [left + size, left + size],
                [node.row + 0.35, child.row + 0.35],
                color="#1f1f1f",
                linewidth=1,
                linestyle="-",
                marker="",
                zorder=0,
            )
        box = Rectangle(
            (left + 0.04, node.row), size - 0.08, 0.74,
            facecolor="white" if node.private else "#f0f0f0", edgecolor="#1f1f1f", linewidth=2.6 if node.found else 0.9,
            linestyle="--" if node.private else "-", hatch="////" if node.found else None, zorder=1,
        )  # fmt: skip
        box.set_hatch_linewidth(0.5)
        axis.add_patch(box)
        _write(axis, left + size / 2, node.row + 0.26, node.ids, size * inches_per_token)
        state = f"out {place_out[node.block]}" if node.block in place_out else f"own {tree.pool.references[node.block]}"
        style = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axis.text(
            left + size / 2, node.row + 0.58, state, ha="center", va="center", fontsize=7.5 if size > 1 else 6.5, bbox=style, zorder=2
        )
    found, total = second.found_tokens, len(second.ids)
    spans = ((0, found, "would find" if second.waits else "found"), (found, total, "waits" if second.waits else "computed"))
    for start, end, words in spans:
        if start < end:
            axis.annotate("", (end - 0.04, -0.12), (start + 0.04, -0.12), arrowprops={"arrowstyle": "|-|, widthA=0.25, widthB=0.25"})
            axis.text((start + end) / 2, -0.26, f"{words} {end - start}", ha="center", va="bottom", fontsize=9.5)
    axis.text(0, -0.72, "The second prompt, in tokens:", fontsize=9.5, weight="bold", va="center")
    axis.text(
        0, tree.rows + 0.25,
        "Thick and hatched: found by the second prompt. Dashed: no key, nobody else can find it.\n"
        "own n: n owners. out n: cached, without an owner, the n-th to be given up.",
        fontsize=9.5, va="center",
    )  # fmt: skip
    return figure


def _write(axis: Any, x: float, y: float, ids: list[int], inches: float) -> None:
    """The tokens' text on one or two lines, in letters that fit into ``inches``."""
    pieces = [_text([token]).replace("\n", "\u21b5") or "?" for token in ids]
    cut = min(range(1, len(pieces) + 1), key=lambda cut: max(len("".join(pieces[:cut])), len("".join(pieces[cut:]))))
    lines = ["".join(pieces[:cut]).strip(), "".join(pieces[cut:]).strip()]
    if sum(map(len, lines)) * 0.085 < inches:
        lines = ["".join(pieces).strip()]
    longest = max(map(len, lines))
    points = min(9.5, 72 * (inches - 0.05) / (0.6 * max(longest, 1)))
    text = "\n".join(line for line in lines if line).replace("$", r"\$")
    style = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axis.text(x, y, text, ha="center", va="center", fontsize=max(points, 3.5), linespacing=0.95, bbox=style, zorder=2)
