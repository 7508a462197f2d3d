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
from dataclasses import dataclass
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


@dataclass(eq=False, slots=True)
class Entry:
    """A cached block: where it is, and what must be equal for a hit. Entries are compared by identity.

    An entry whose parent goes has to go too: nobody could reach it any more. So all that is indexed can be found.
    """

    block: int
    key: bytes
    parent: Entry | bytes  # the entry before it, or the namespace for a first block
    tokens: bytes
    children: dict[Entry, None] | None = None  # a set that keeps its order; most entries have none or one


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
        self._by_block: dict[int, Entry] = {}
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        """Blocks that can be found, whether somebody owns them or not."""
        return len(self._entries)

    def lookup(self, chain: KeyChain, most: int) -> list[Entry]:
        """The longest run of cached blocks from the start of ``chain``, at most ``most``. Changes nothing."""
        hits: list[Entry] = []
        parent: Entry | bytes = chain.namespace
        entries = self._entries
        for i in range(min(most, len(chain.keys))):
            entry = entries.get(chain.keys[i])
            if entry is None or entry.tokens != chain.chunks[i] or entry.parent != parent:
                break
            hits.append(entry)
            parent = entry
        return hits

    def publish(self, chain: KeyChain, table: BlockTable, published: int) -> int:
        """Make the full, computed blocks of ``table`` findable, from number ``published`` on; returns how many now are.

        Call it only when their K and V have been written. A block whose content is cached in another block stays
        private, and those behind it are chained to the cached one.
        """
        full = min(table.num_tokens // table.block_size, len(chain.keys))
        if published >= full:
            return published
        parent: Entry | bytes = chain.namespace
        if published and chain.linked is not None and self._by_block.get(chain.linked.block) is chain.linked:
            parent = chain.linked
        else:  # the block before was evicted meanwhile (it was somebody else's): link the chain anew
            published = 0
        for i in range(published, full):
            entry = self._entries.get(chain.keys[i])
            if entry is None:
                entry = self._insert(table.blocks[i], chain.keys[i], parent, chain.chunks[i])
            elif entry.tokens != chain.chunks[i] or entry.parent != parent:
                return i  # two contents with one key: what is behind cannot be chained
            parent = chain.linked = entry
        return full

    def _insert(self, block: int, key: bytes, parent: Entry | bytes, tokens: bytes) -> Entry:
        self.pool.keep(block)
        entry = self._entries[key] = self._by_block[block] = Entry(block, key, parent, tokens)
        if type(parent) is Entry:
            if parent.children is None:
                parent.children = {}
            parent.children[entry] = None
        for listener in self.listeners:
            listener.stored(key)
        return entry

    def _evicted(self, block: int) -> None:
        self._drop(self._by_block[block])

    def _remove(self, entry: Entry) -> None:
        self.pool.forget(entry.block)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        """Take ``entry`` out of the index, and before it whatever is chained to it."""
        if isinstance(entry.parent, Entry):
            assert entry.parent.children is not None
            del entry.parent.children[entry]
        if entry.children:
            last_first = list(entry.children)
            for each in last_first:  # grows while it is walked
                last_first += each.children or ()
            for each in reversed(last_first):
                each.children = None
                self.pool.forget(each.block)
                self._unlist(each)
            entry.children = None
        self._unlist(entry)

    def _unlist(self, entry: Entry) -> None:
        del self._entries[entry.key], self._by_block[entry.block]
        for listener in self.listeners:
            listener.removed(entry.key)

    def clear(self) -> None:
        """Forget every key. Blocks keep their owners; those without become free."""
        for entry in list(self._entries.values()):
            if not isinstance(entry.parent, Entry):
                self._remove(entry)

    def check_integrity(self) -> None:
        """AssertionError unless the index and the pool agree on which blocks have a key."""
        assert len(self._entries) == len(self._by_block), f"{len(self._entries)} keys for {len(self._by_block)} blocks"
        for key, entry in self._entries.items():
            assert entry.key == key, f"block {entry.block} is indexed under two keys"
            assert self._by_block[entry.block] is entry, f"two keys lead to block {entry.block}"
            parent = entry.parent
            assert not isinstance(parent, Entry) or self._by_block.get(parent.block) is parent, f"block {entry.block} lost its parent"
        kept = {block for block, kept in enumerate(self.pool.kept) if kept}
        assert kept == set(self._by_block), f"blocks {sorted(kept ^ set(self._by_block))} have a key on one side only"
