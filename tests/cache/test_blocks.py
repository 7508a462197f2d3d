"""Blocks and tables: every block is in exactly one place, and whoever misuses them is told so and changes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minikv.cache.blocks import BlockPool, BlockTable, FirstInFirstOut, LeastRecentlyUsed, blocks_for


def table_of(num_tokens: int, block_size: int) -> BlockTable:
    table = BlockTable(block_size)
    table.blocks.extend(range(100, 100 + blocks_for(num_tokens, block_size)))
    table.num_tokens = num_tokens
    return table


def snapshot(pool: BlockPool) -> tuple[object, ...]:
    order = list(pool._cached._order)  # type: ignore[attr-defined]
    return list(pool.references), list(pool.kept), list(pool._free), order, pool.evictions


@pytest.mark.parametrize(
    ("tokens", "last", "full"),
    [(0, 0, True), (1, 1, False), (3, 3, False), (4, 4, True), (5, 1, False), (8, 4, True), (9, 1, False)],
)
def test_case_9_tokens_in_the_last_block_of_4(tokens, last, full):
    table = table_of(tokens, 4)
    assert (table.last_block_tokens, table.last_block_is_full) == (last, full)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_case_9_with_one_slot_a_block_every_last_block_holds_one(tokens):
    table = table_of(tokens, 1)
    assert (len(table), table.last_block_tokens, table.last_block_is_full) == (tokens, 1, True)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_case_9_blocks_for_rounds_up(tokens, blocks):
    assert blocks_for(tokens, 4) == blocks


def test_a_token_lies_in_the_slot_that_its_position_says():
    table = table_of(9, 4)
    assert [table.locate(p) for p in (0, 3, 4, 8, 11)] == [(100, 0), (100, 3), (101, 0), (102, 0), (102, 3)]
    for position in (-1, 12):
        with pytest.raises(IndexError, match=rf"position {position} .* 12 slots"):
            table.locate(position)


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (-1, 4), (4, 0), (4, -2)])
def test_a_pool_without_a_slot_is_refused_with_both_numbers(blocks, size):
    with pytest.raises(ValueError, match=f"num_blocks={blocks}, block_size={size}"):
        BlockPool(blocks, size)


def test_free_blocks_are_handed_out_before_cached_ones():
    pool = BlockPool(3, 4)
    first = pool.allocate()
    pool.keep([first])
    pool.release([first])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert first not in {pool.allocate(), pool.allocate()}
    assert pool.allocate() == first
    assert pool.evictions == 1
    with pytest.raises(MemoryError, match="all 3 blocks"):
        pool.allocate()


def test_case_15_the_pool_gives_up_a_chain_from_its_tail():
    pool = BlockPool(3, 4)
    chain = [pool.allocate() for _ in range(3)]
    pool.keep(chain)
    pool.release(reversed(chain))
    assert [pool.allocate() for _ in range(3)] == chain[::-1]


def test_a_hit_makes_a_block_the_most_recently_used_one():
    pool = BlockPool(3, 4)
    a, b, c = (pool.allocate() for _ in range(3))
    for block in (a, b, c):
        pool.keep([block])
        pool.release([block])
    pool.share([a])
    assert (pool.num_free, pool.num_cached) == (2, 2)
    pool.release([a])
    assert [pool.allocate() for _ in range(3)] == [b, c, a]


def test_eviction_is_told_of_before_the_block_is_somebody_elses():
    pool, told = BlockPool(1, 4), []
    pool.on_evict = lambda block: told.append((block, pool.references[block], pool.kept[block]))
    pool.keep([pool.allocate()])
    pool.release([0])
    pool.allocate()
    assert told == [(0, 0, False)]


def with_one_block_of_each_kind() -> tuple[BlockPool, int, int, int]:
    pool = BlockPool(4, 4)
    owned, cached = pool.allocate(), pool.allocate()
    pool.keep([cached])
    pool.release([cached])
    return pool, owned, cached, 3


MISUSES = {
    "share a free block": lambda pool, owned, cached, free: pool.share([free]),
    "share no block of the pool": lambda pool, owned, cached, free: pool.share([4]),
    "share block -1": lambda pool, owned, cached, free: pool.share([-1]),
    "release a free block": lambda pool, owned, cached, free: pool.release([free]),
    "release a cached block": lambda pool, owned, cached, free: pool.release([cached]),
    "release twice": lambda pool, owned, cached, free: pool.release([owned, owned]),
    "release a good one, then a bad one": lambda pool, owned, cached, free: pool.release([owned, free]),
    "release a good one, then none of the pool": lambda pool, owned, cached, free: pool.release(iter([owned, 9])),
    "release block -1": lambda pool, owned, cached, free: pool.release([-1]),
    "keep a free block": lambda pool, owned, cached, free: pool.keep([free]),
    "keep a cached block": lambda pool, owned, cached, free: pool.keep([cached]),
    "keep block -4": lambda pool, owned, cached, free: pool.keep([-4]),
    "forget an owned block without a key": lambda pool, owned, cached, free: pool.forget([owned]),
    "forget a free block": lambda pool, owned, cached, free: pool.forget([free]),
    "forget block -3": lambda pool, owned, cached, free: pool.forget([-3]),
    "share good ones, then a free one": lambda pool, owned, cached, free: pool.share([owned, cached, cached, free]),
    "share good ones, then none of the pool": lambda pool, owned, cached, free: pool.share([cached, owned, -1]),
    "keep a good one, then a free one": lambda pool, owned, cached, free: pool.keep([owned, free]),
    "keep a good one, then none of the pool": lambda pool, owned, cached, free: pool.keep([owned, 4]),
    "keep twice": lambda pool, owned, cached, free: pool.keep([owned, owned]),
    "forget a good one, then one without a key": lambda pool, owned, cached, free: pool.forget([cached, owned]),
    "forget a good one, then none of the pool": lambda pool, owned, cached, free: pool.forget([cached, 4]),
    "forget twice": lambda pool, owned, cached, free: pool.forget([cached, cached]),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_of_the_pool_raises_and_changes_nothing(misuse):
    pool, owned, cached, free = with_one_block_of_each_kind()
    before = snapshot(pool)
    with pytest.raises(ValueError, match=r"block -?[0-9]"):
        MISUSES[misuse](pool, owned, cached, free)
    assert snapshot(pool) == before


def test_only_a_block_with_one_owner_and_no_key_may_be_written_to():
    pool, owned, cached, free = with_one_block_of_each_kind()
    assert [pool.writable(block) for block in (owned, cached, free)] == [True, False, False]
    pool.share([owned])
    assert not pool.writable(owned)
    pool.release([owned])
    assert pool.writable(owned)
    pool.keep([owned])
    assert not pool.writable(owned)
    pool.forget([owned])
    assert pool.writable(owned)


DAMAGES = {
    "in the free list twice": lambda pool, table: pool._free.append(pool._free[0]),
    "in 2 places": lambda pool, table: pool._free.append(table.blocks[0]),
    "in 0 places": lambda pool, table: pool._free.pop(),
    "1 owners by the tables, 2 references": lambda pool, table: pool.references.__setitem__(table.blocks[0], 2),
    "0 owners by the tables, 1 references": lambda pool, table: table.blocks.pop(),
    "names a block twice": lambda pool, table: table.blocks.append(table.blocks[0]),
    "cached without a key": lambda pool, table: pool.kept.__setitem__(2, False),
    "has a key and is free": lambda pool, table: pool.kept.__setitem__(pool._free[0], True),
}


@pytest.mark.parametrize("complaint", DAMAGES)
def test_the_integrity_check_finds(complaint):
    pool, table = BlockPool(5, 4), BlockTable(4)
    table.blocks.extend([pool.allocate(), pool.allocate()])
    cached = pool.allocate()
    pool.keep([cached])
    pool.release([cached])
    pool.check_integrity([table])
    DAMAGES[complaint](pool, table)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity([table])


def test_the_bookkeeping_imports_no_torch():
    code = "import sys, minikv.cache.blocks, minikv.cache.prefix, minikv.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that is three plain collections: free, cached (in order of eviction) and owners."""

    @initialize(blocks=st.integers(1, 6))
    def start(self, blocks):
        self.pool, self.twin = BlockPool(blocks, 2), BlockPool(blocks, 2)
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append
        self.free, self.cached, self.owners, self.kept = set(range(blocks)), [], {}, set()

    def pick(self, data, blocks):
        return data.draw(st.sampled_from(sorted(blocks)))

    @rule()
    def allocate(self):
        if not self.free and not self.cached:
            with pytest.raises(MemoryError):
                self.pool.allocate()
            return
        block = self.pool.allocate()
        assert self.twin.allocate() == block
        if self.free:
            self.free.remove(block)
        else:
            assert block == self.cached.pop(0)
            assert self.evicted.pop() == block
            self.kept.remove(block)
        assert not self.evicted
        self.owners[block] = 1

    def some(self, data):
        return data.draw(st.lists(st.integers(-1, self.pool.num_blocks), max_size=4))

    def refused(self, change, blocks):
        """``change(blocks)`` raises and changes nothing."""
        before = snapshot(self.pool)
        with pytest.raises(ValueError, match=r"block -?[0-9]"):
            change(blocks)
        assert snapshot(self.pool) == before

    def both(self, name, blocks):
        """The pool gets ``blocks`` in one call, its twin one by one."""
        getattr(self.pool, name)(blocks)
        for block in blocks:
            getattr(self.twin, name)([block])

    @rule(data=st.data())
    def share_some(self, data):
        blocks = self.some(data)
        if any(block not in self.owners and block not in self.cached for block in blocks):
            self.refused(self.pool.share, blocks)
            return
        self.both("share", blocks)
        for block in blocks:
            if block in self.cached:
                self.cached.remove(block)
            self.owners[block] = self.owners.get(block, 0) + 1

    @rule(data=st.data())
    def release_some(self, data):
        blocks = self.some(data)
        if any(blocks.count(block) > self.owners.get(block, 0) for block in blocks):
            self.refused(self.pool.release, blocks)
            return
        self.both("release", blocks)
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                if block in self.kept:
                    self.cached.append(block)
                else:
                    self.free.add(block)

    @rule(data=st.data())
    def keep_some(self, data):
        blocks = self.some(data)
        if len(set(blocks)) < len(blocks) or not set(blocks) <= set(self.owners) - self.kept:
            self.refused(self.pool.keep, blocks)
            return
        self.both("keep", blocks)
        self.kept |= set(blocks)

    @precondition(lambda self: any(block not in self.kept for block in self.owners))
    @rule(data=st.data())
    def keep(self, data):
        block = self.pick(data, set(self.owners) - self.kept)
        self.both("keep", [block])
        self.kept.add(block)

    @rule(data=st.data())
    def forget_some(self, data):
        blocks = self.some(data)
        if len(set(blocks)) < len(blocks) or not set(blocks) <= self.kept:
            self.refused(self.pool.forget, blocks)
            return
        self.both("forget", blocks)
        self.kept -= set(blocks)
        self.free |= set(self.cached) & set(blocks)
        self.cached = [block for block in self.cached if block not in blocks]

    @invariant()
    def the_same_as_the_model(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert snapshot(pool) == snapshot(self.twin), "many at once are the same as one by one"
        assert list(pool._cached._order) == self.cached
        assert pool.references == [self.owners.get(block, 0) for block in range(pool.num_blocks)]
        assert pool.kept == [block in self.kept for block in range(pool.num_blocks)]
        assert (pool.num_free, pool.num_cached) == (len(self.free) + len(self.cached), len(self.cached))
        tables = [BlockTable(2) for _ in range(max(self.owners.values(), default=0))]
        for block, owners in self.owners.items():
            for table in tables[:owners]:
                table.blocks.append(block)
        pool.check_integrity(tables)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_least_recently_used_keeps_the_order_in_which_blocks_came():
    lru = LeastRecentlyUsed()
    lru.add([3, 1])
    lru.add([2])
    lru.remove([1])
    lru.add([1])
    assert (len(lru), 1 in lru, 5 in lru) == (3, True, False)
    assert [lru.choose() for _ in range(3)] == [3, 2, 1]


def test_first_in_first_out_ignores_use_and_remembers_each_block_once():
    policy = FirstInFirstOut()
    policy.keep([0, 1, 2])
    policy.add([2, 1, 0])
    for _ in range(1_000):  # block 0 is hit again and again
        policy.remove([0])
        policy.add([0])
    assert len(policy._heap) == 3
    assert [policy.choose(), policy.choose()] == [0, 1]
    policy.keep([0])  # new content in block 0: the youngest now
    policy.add([0])
    assert [policy.choose(), policy.choose()] == [2, 0]
    assert len(policy) == 0


def test_a_policy_belongs_to_one_pool():
    policy = LeastRecentlyUsed()
    pool = BlockPool(2, 4, policy)
    block = pool.allocate()
    pool.keep([block])
    pool.release([block])
    with pytest.raises(ValueError, match="another pool"):
        BlockPool(2, 4, policy)


def test_many_blocks_are_all_or_nothing():
    pool = BlockPool(3, 4)
    assert sorted(pool.allocate_many(2)) == [0, 1]
    with pytest.raises(MemoryError, match="2 blocks are wanted"):
        pool.allocate_many(2)
    assert pool.num_free == 1
    assert pool.allocate_many(0) == []
