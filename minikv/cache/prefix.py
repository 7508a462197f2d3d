"""Sharing the prefix: blocks that are found again by what is in them.

The K and V of a token depend on every token before it, so a block can be reused only by a request that begins with the
same tokens up to the block's end. That rules out a plain dictionary from words to values: the key of a block must hold
its whole past. Chaining does it: key(block) = hash(key(block before), tokens of the block), and the first block's
parent is a *namespace*: whatever else the content depends on (the model, the dtype, a tenant's salt). Two requests
share exactly as many leading blocks as have equal keys.

    namespace -> [the quick brown fox] -> [jumps over the lazy] -> [dog . So what]
                                     \\-> [is not as quick as]

Only full blocks have keys: a partly filled one will still change. A block gets its key once its KV has been computed,
never before, so that nobody reads what is not written yet. When a block's content is already cached elsewhere, the
second block stays private. A hash alone is never believed: an entry keeps its parent and its tokens, and a hit compares
both, so even a hash that returned a constant would not serve one prompt's KV to another.

The design follows vLLM's automatic prefix caching; like the block pool, it is bookkeeping and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Protocol

from minikv.cache.blocks import BlockPool, BlockTable


def namespace(**fields: str | int | None) -> bytes:
    """An unambiguous encoding of everything besides tokens that KV depends on.

    JSON with the fields' names: no two different sets of fields give the same bytes, so a salt "x" is no adapter "x".
    """
    return json.dumps(fields, sort_keys=True).encode()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block: sha256 over its parent's key (32 bytes) and its tokens (8 bytes each)."""
    return hashlib.sha256(parent + tokens).digest()


class KeyChain:
    """The keys of one sequence's full blocks, computed once and extended as it grows.

    ``keys[i]`` is the key of block i, ``chunks[i]`` its tokens as int64 bytes. ``linked`` is the cache's entry for the
    last block that has been hit or published: the one that the next is chained to.
    """

    __slots__ = ("_last", "block_size", "chunks", "keys", "linked", "namespace")

    def __init__(self, namespace: bytes, block_size: int) -> None:
        self.namespace, self.block_size = namespace, block_size
        self.keys: list[bytes] = []
        self.chunks: list[bytes] = []
        self.linked: Entry | None = None
        self._last = hashlib.sha256(namespace).digest()

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the keys of the full blocks of ``tokens`` (the whole sequence so far) that have none yet."""
        size = self.block_size
        done = len(self.keys) * size
        full = len(tokens) // size * size
        if full == done:
            return
        packed = array("q", tokens[done:full]).tobytes()
        for first in range(0, len(packed), 8 * size):
            chunk = packed[first : first + 8 * size]
            self._last = block_key(self._last, chunk)
            self.keys.append(self._last)
            self.chunks.append(chunk)

    def copy(self) -> KeyChain:
        """An independent chain with the same past: what a fork starts with."""
        other = KeyChain(self.namespace, self.block_size)
        other.keys, other.chunks, other._last = self.keys.copy(), self.chunks.copy(), self._last
        other.linked = self.linked
        return other


class Entry:
    """A cached block: where it is, and what must be equal for a hit. Entries are compared by identity.

    An entry whose parent goes has to go too: nobody could reach it any more. So all that is indexed can be found.
    Most entries have one child, the next block of the only prompt that ran through them, and a dict for it would be
    larger than the entry. So ``children`` is that child itself, and a dict only from the second one on.
    """

    __slots__ = ("block", "children", "key", "parent", "tokens")

    def __init__(self, block: int, key: bytes, parent: Entry | bytes, tokens: bytes) -> None:
        self.block, self.key, self.tokens = block, key, tokens
        self.parent = parent  # the entry before it, or the namespace for a first block
        self.children: Entry | dict[Entry, None] | None = None  # the dict is a set that keeps its order

    def adopt(self, child: Entry) -> None:
        """``child`` is chained to this entry now."""
        if self.children is None:
            self.children = child
        elif isinstance(self.children, Entry):
            self.children = {self.children: None, child: None}
        else:
            self.children[child] = None

    def disown(self, child: Entry) -> None:
        """``child``, which is chained to this entry, goes."""
        if isinstance(self.children, dict):
            del self.children[child]
        else:
            self.children = None

    def descendants(self) -> list[Entry]:
        """All that is chained to this entry, directly or not; parents before their children."""
        found = [self]
        for each in found:  # grows while it is walked
            if isinstance(each.children, Entry):
                found.append(each.children)
            elif each.children:
                found += each.children
        return found[1:]


class Listener(Protocol):
    """Told which keys can be found here (a router listens, to send a request where its prefix is)."""

    def stored(self, key: bytes) -> None: ...

    def removed(self, key: bytes) -> None: ...


class PrefixCache:
    """Chained keys -> blocks, on top of a BlockPool whose cached blocks it can revive.

    The pool owns the reference counts and the eviction order; this class owns the index.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.listeners: list[Listener] = []
        self._entries: dict[bytes, Entry] = {}
        self._by_block: list[Entry | None] = [None] * pool.num_blocks
        pool.on_evict = self._drop

    def __len__(self) -> int:
        """Blocks that can be found, whether somebody owns them or not."""
        return len(self._entries)

    def lookup(self, chain: KeyChain, most: int) -> list[Entry]:
        """The longest run of cached blocks from the start of ``chain``, at most ``most``. Changes nothing."""
        return self._cached_run(chain, chain.namespace, 0, min(most, len(chain.keys)))

    def _cached_run(self, chain: KeyChain, parent: Entry | bytes, first: int, end: int) -> list[Entry]:
        """The cached blocks of ``chain`` behind ``parent``, from number ``first`` on, up to ``end`` or one that is missing."""
        run: list[Entry] = []
        entries, keys, chunks = self._entries, chain.keys, chain.chunks
        for i in range(first, end):
            entry = entries.get(keys[i])
            if entry is None or entry.tokens != chunks[i] or (entry.parent is not parent and entry.parent != parent):
                break
            run.append(entry)
            parent = entry
        return run

    def publish(self, chain: KeyChain, table: BlockTable, published: int) -> int:
        """Make the full, computed blocks of ``table`` findable, from number ``published`` on; returns how many now are.

        Call it only when their K and V have been written. A block whose content is cached in another block stays
        private, and those behind it are chained to the cached one.
        """
        full = min(table.num_tokens // table.block_size, len(chain.keys))
        if published >= full:
            return published
        parent: Entry | bytes = chain.namespace
        if published and chain.linked is not None and self._entries.get(chain.linked.key) is chain.linked:
            parent = chain.linked
        else:  # the block before was evicted meanwhile (it was somebody else's): link the chain anew
            published = 0
        cached = self._cached_run(chain, parent, published, full)
        published += len(cached)
        if cached:
            parent = chain.linked = cached[-1]
        if published < full:
            published += self._insert(chain, parent, table.blocks[published:full], published)
        return published

    def _insert(self, chain: KeyChain, parent: Entry | bytes, blocks: Sequence[int], first: int) -> int:
        """Index ``blocks`` under the keys of ``chain`` from number ``first`` on, each chained to the one before.

        Behind a block that is not cached, none can be. So when a key is taken all the same, then by another content: from
        there on, nothing can be chained. Returns how many were indexed; if the pool refuses one block, none is.
        """
        self.pool.keep(blocks)
        entries, by_block = self._entries, self._by_block
        indexed = 0
        last = parent if isinstance(parent, Entry) else None
        for block, key, tokens in zip(blocks, chain.keys[first:], chain.chunks[first:], strict=False):
            entry = Entry(block, key, parent, tokens)
            if entries.setdefault(key, entry) is not entry:
                break
            if indexed:
                last.children = entry  # type: ignore[union-attr]  # the last one is new itself: this is its only child
            elif last is not None:
                last.adopt(entry)
            by_block[block] = parent = last = entry
            indexed += 1
        if indexed:
            chain.linked = last
        if indexed < len(blocks):
            self.pool.forget(blocks[indexed:])
        for listener in self.listeners:
            for key in chain.keys[first : first + indexed]:
                listener.stored(key)
        return indexed

    def _drop(self, block: int) -> None:
        """Take what ``block`` held out of the index, and before it whatever is chained to it. The pool has forgotten it."""
        entry = self._by_block[block]
        assert entry is not None, f"block {block} has no key"
        if entry.children:
            descendants = entry.descendants()[::-1]
            self.pool.forget([each.block for each in descendants])
            for each in descendants:
                self._unlist(each)
        if isinstance(entry.parent, Entry):
            entry.parent.disown(entry)
        self._unlist(entry)

    def _unlist(self, entry: Entry) -> None:
        entry.children = None  # no cycle is left for the garbage collector
        del self._entries[entry.key]
        self._by_block[entry.block] = None
        for listener in self.listeners:
            listener.removed(entry.key)

    def clear(self) -> None:
        """Forget every key. Blocks keep their owners; those without become free."""
        for entry in list(self._entries.values()):
            if not isinstance(entry.parent, Entry):
                self.pool.forget([entry.block])
                self._drop(entry.block)

    def check_integrity(self) -> None:
        """AssertionError unless the index and the pool agree on which blocks have a key."""
        indexed = {block for block, entry in enumerate(self._by_block) if entry is not None}
        assert len(self._entries) == len(indexed), f"{len(self._entries)} keys for {len(indexed)} blocks"
        for key, entry in self._entries.items():
            assert entry.key == key, f"block {entry.block} is indexed under two keys"
            assert self._by_block[entry.block] is entry, f"two keys lead to block {entry.block}"
            parent = entry.parent
            assert not isinstance(parent, Entry) or self._entries.get(parent.key) is parent, f"block {entry.block} lost its parent"
        kept = {block for block, kept in enumerate(self.pool.kept) if kept}
        assert kept == indexed, f"blocks {sorted(kept ^ indexed)} have a key on one side only"
