"""The prefix cache: what is found is exactly what was published and not given up, and never another prompt's KV."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minikv.cache import prefix
from minikv.cache.blocks import BlockPool, BlockTable, LeastRecentlyUsed, blocks_for
from minikv.cache.prefix import KeyChain, PrefixCache, namespace

SPACE = namespace(content="model", salt=None)


class Sequence:
    """What a scheduler does with a sequence, without a model: ``written`` records whose KV lies in which block."""

    def __init__(self, cache: PrefixCache, written: dict[int, object], tokens: list[int], space: bytes = SPACE) -> None:
        self.cache, self.written, self.tokens, self.space = cache, written, list(tokens), space
        size = cache.pool.block_size
        self.table, self.chain = BlockTable(size), KeyChain(space, size)
        self.chain.extend(self.tokens)
        self.hits = cache.lookup(self.chain, most=(len(tokens) - 1) // size)
        self.table.blocks.extend([hit.block for hit in self.hits])
        cache.pool.share(self.table.blocks)
        self.published, self.chain.linked = len(self.hits), self.hits[-1] if self.hits else None
        self.compute(len(self.hits))

    def compute(self, first: int) -> None:
        """Write the blocks from number ``first`` on, then make them findable."""
        pool, size = self.cache.pool, self.cache.pool.block_size
        while len(self.table) < blocks_for(len(self.tokens), size):
            self.table.blocks.append(pool.allocate())
        for i in range(first, len(self.table)):
            assert pool.writable(self.table.blocks[i])
            self.written[self.table.blocks[i]] = (self.space, tuple(self.tokens[: (i + 1) * size]))
        self.table.num_tokens = len(self.tokens)
        self.chain.extend(self.tokens)
        self.published = self.cache.publish(self.chain, self.table, self.published)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.compute((len(self.tokens) - 1) // self.cache.pool.block_size)

    def end(self) -> None:
        self.cache.pool.release(reversed(self.table.blocks))
        del self.table.blocks[:]


class Ear:
    """A listener that knows what can be found, if it is told the truth."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def stored(self, key: bytes) -> None:
        assert key not in self.keys
        self.keys.add(key)

    def removed(self, key: bytes) -> None:
        self.keys.remove(key)


@pytest.fixture
def run():
    """run(pool) -> (cache, serve): ``serve(tokens)`` is a whole request, from lookup to release; returns its hits."""

    def make(num_blocks, block_size=4):
        cache, written = PrefixCache(BlockPool(num_blocks, block_size)), {}

        def serve(tokens, space=SPACE):
            sequence = Sequence(cache, written, tokens, space)
            sequence.end()
            cache.check_integrity()
            cache.pool.check_integrity()
            return len(sequence.hits)

        return cache, serve

    return make


def found(cache, tokens, space=SPACE):
    chain = KeyChain(space, cache.pool.block_size)
    chain.extend(tokens)
    return len(cache.lookup(chain, most=len(tokens)))


# ---------------------------------------------------------------- keys


def test_a_key_holds_its_whole_past():
    left, right = KeyChain(SPACE, 2), KeyChain(SPACE, 2)
    left.extend([1, 2, 5, 6])
    right.extend([1, 3, 5, 6])
    assert left.chunks[1] == right.chunks[1]
    assert left.keys[1] != right.keys[1]


def test_a_key_is_sha256_of_parent_and_tokens():
    chain = KeyChain(b"space", 2)
    chain.extend([1, 2, 3])
    first = hashlib.sha256(hashlib.sha256(b"space").digest() + b"\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0").digest()
    assert chain.keys == [first]


@given(st.lists(st.integers(0, 2**40), max_size=20), st.integers(1, 4), st.lists(st.integers(0, 20), max_size=4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_chain_extended_in_pieces_is_the_chain_of_the_whole(tokens, size, cuts):
    whole, pieces = KeyChain(SPACE, size), KeyChain(SPACE, size)
    whole.extend(tokens)
    for cut in [*sorted(cuts), len(tokens)]:
        if cut <= len(tokens):
            pieces.extend(tokens[:cut])
    assert (pieces.keys, pieces.chunks) == (whole.keys, whole.chunks)
    assert len(whole.keys) == len(tokens) // size


def test_a_copied_chain_goes_its_own_way():
    chain = KeyChain(SPACE, 2)
    chain.extend([1, 2])
    other = chain.copy()
    chain.extend([1, 2, 3, 4])
    other.extend([1, 2, 5, 6])
    straight = KeyChain(SPACE, 2)
    straight.extend([1, 2, 5, 6])
    assert other.keys == straight.keys != chain.keys
    assert len(chain.keys) == 2


values = st.one_of(st.none(), st.text(max_size=3), st.integers(0, 9))
names = st.dictionaries(st.sampled_from(["adapter", "salt", "model", "dtype"]), values)


@given(names, names)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_case_14_different_fields_are_different_namespaces(left, right):
    assert (namespace(**left) == namespace(**right)) == (left == right)


def test_case_14_an_adapter_named_like_a_salt_is_no_salt():
    assert namespace(adapter="x", salt=None) != namespace(adapter=None, salt="x")
    assert namespace(salt=None) != namespace(salt="null")
    assert namespace(salt='x", "adapter": "y') != namespace(salt="x", adapter="y")


def test_case_14_a_different_salt_never_hits(run):
    _, serve = run(8)
    a, b = namespace(content="m", salt="a"), namespace(content="m", salt="b")
    assert [serve(list(range(9)), space) for space in (a, b, a, b)] == [0, 0, 2, 2]


# ---------------------------------------------------------------- lookup, publish, eviction


def test_case_12_one_token_is_always_left_to_compute(run):
    _, serve = run(8)
    assert [serve(list(range(8))) for _ in range(2)] == [0, 1]
    assert serve(list(range(9))) == 2


def test_case_15_the_tail_of_a_chain_goes_first(run):
    cache, serve = run(3)
    assert serve(list(range(12))) == 0
    assert serve([7] * 4) == 0
    assert found(cache, list(range(12))) == 2
    assert serve(list(range(12))) == 2


def test_case_15_the_shared_head_outlives_its_branches(run):
    cache, serve = run(4)
    for branch in (1, 2):
        serve([0] * 4 + [branch] * 4)
    serve([9] * 8)  # takes the free block and evicts one
    assert found(cache, [0] * 4) == 1
    assert [found(cache, [0] * 4 + [branch] * 4) for branch in (1, 2)] == [1, 2]


def test_case_17_a_hit_keeps_its_entry(run):
    _, serve = run(8)
    assert [serve(list(range(10))) for _ in range(4)] == [0, 2, 2, 2]


def test_case_18_nothing_is_found_after_clear(run):
    cache, serve = run(8)
    serve(list(range(12)))
    running = Sequence(cache, {}, list(range(100, 108)))
    ear = Ear()
    ear.keys = set(cache._entries)
    cache.listeners.append(ear)
    cache.clear()
    assert (len(cache), ear.keys, found(cache, list(range(12)))) == (0, set(), 0)
    cache.pool.check_integrity([running.table])
    running.end()
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 0)
    assert serve(list(range(12))) == 0


def test_only_full_computed_blocks_are_findable():
    cache = PrefixCache(BlockPool(4, 4))
    chain, table = KeyChain(SPACE, 4), BlockTable(4)
    chain.extend(list(range(8)))
    table.blocks.extend([cache.pool.allocate(), cache.pool.allocate()])
    for computed, findable in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        table.num_tokens = computed
        assert cache.publish(chain, table, len(cache)) == findable == len(cache)
        assert len(cache.lookup(chain, most=9)) == findable


def test_lookup_changes_nothing(run):
    cache, serve = run(8)
    serve(list(range(12)))
    before = (list(cache.pool.references), list(cache.pool._cached._order), dict(cache._entries))
    assert found(cache, list(range(12))) == 3
    assert (list(cache.pool.references), list(cache.pool._cached._order), dict(cache._entries)) == before


def test_a_second_block_with_an_existing_key_stays_private():
    cache, written = PrefixCache(BlockPool(8, 2)), {}
    chains = [KeyChain(SPACE, 2) for _ in range(2)]
    tables = [BlockTable(2) for _ in range(2)]
    for chain, table in zip(chains, tables, strict=True):  # both computed at the same time, before either was findable
        chain.extend([1, 2, 3, 4])
        table.blocks.extend([cache.pool.allocate(), cache.pool.allocate()])
        table.num_tokens = 4
    assert [cache.publish(chain, table, 0) for chain, table in zip(chains, tables, strict=True)] == [2, 2]
    assert [cache.pool.kept[block] for block in range(4)] == [True, True, False, False]
    cache.pool.release(reversed(tables[1].blocks))
    assert (cache.pool.num_cached, len(cache)) == (0, 2)
    assert len(Sequence(cache, written, [1, 2, 3, 4, 5]).hits) == 2


def test_an_entry_goes_with_its_parent_and_comes_back_with_it():
    cache, written, ear = PrefixCache(BlockPool(5, 2)), {}, Ear()
    cache.listeners.append(ear)
    first, second = KeyChain(SPACE, 2), KeyChain(SPACE, 2)
    tables = [BlockTable(2), BlockTable(2)]
    for chain, table in ((first, tables[0]), (second, tables[1])):
        chain.extend([1, 2])
        table.blocks.append(cache.pool.allocate())
        table.num_tokens = 2
    cache.publish(first, tables[0], 0)
    published = cache.publish(second, tables[1], 0)  # stays private: chained to the first one's block
    second.extend([1, 2, 3, 4])
    tables[1].blocks.append(cache.pool.allocate())
    tables[1].num_tokens = 4
    published = cache.publish(second, tables[1], published)
    assert (published, ear.keys) == (2, set(second.keys))

    cache.pool.release(tables[0].blocks)
    tables[0].blocks.pop()
    others = [cache.pool.allocate() for _ in range(3)]  # evicts the first one's block; the second lives on
    assert (len(cache), ear.keys, found(cache, [1, 2, 3, 4])) == (0, set(), 0)
    cache.pool.release(others)
    cache.check_integrity()
    cache.pool.check_integrity([tables[1]])

    second.extend([1, 2, 3, 4, 5, 6])
    tables[1].blocks.append(cache.pool.allocate())
    tables[1].num_tokens = 6
    assert cache.publish(second, tables[1], published) == 3
    assert (found(cache, [1, 2, 3, 4, 5, 6]), ear.keys) == (3, set(second.keys))
    cache.check_integrity()
    assert written == {}


def chain_and_table(cache: PrefixCache, tokens: list[int]) -> tuple[KeyChain, BlockTable]:
    """A sequence whose blocks are computed and not yet published."""
    chain, table = KeyChain(SPACE, cache.pool.block_size), BlockTable(cache.pool.block_size)
    chain.extend(tokens)
    table.blocks.extend(cache.pool.allocate_many(len(chain.keys)))
    table.num_tokens = len(tokens)
    return chain, table


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("how", ["without an owner", "with a key already"])
def test_a_run_with_one_block_that_the_pool_refuses_is_not_published_at_all(wrong, how):
    cache, ear = PrefixCache(BlockPool(8, 1)), Ear()
    cache.listeners.append(ear)
    head = chain_and_table(cache, [1])
    cache.publish(*head, 0)
    chain, table = chain_and_table(cache, [1, 2, 3, 4])
    block = table.blocks[1 + wrong]
    (cache.pool.release if how == "without an owner" else cache.pool.keep)([block])
    before = list(cache.pool.kept), dict(cache._entries), set(ear.keys)
    with pytest.raises(ValueError, match=f"block {block} cannot be kept"):
        cache.publish(chain, table, 0)
    assert (list(cache.pool.kept), cache._entries, ear.keys) == before
    assert cache._entries[chain.keys[0]].children is None


@pytest.mark.parametrize("first_taken", [0, 1, 2, 3])
def test_a_run_ends_where_a_key_is_taken_by_another_content(first_taken):
    keys = [bytes([9, number]) for number in range(3)]
    cache = PrefixCache(BlockPool(8, 1))
    chain, table = chain_and_table(cache, [1, 2, 3])
    chain.keys = keys[:first_taken] + [b"taken"] * (3 - first_taken)
    other = chain_and_table(cache, [7])
    other[0].keys = [b"taken"]
    cache.publish(*other, 0)
    assert cache.publish(chain, table, 0) == first_taken
    assert [cache.pool.kept[block] for block in table.blocks] == [number < first_taken for number in range(3)]
    assert chain.linked is (cache._entries[keys[first_taken - 1]] if first_taken else None)
    cache.check_integrity()
    cache.pool.check_integrity([table, other[1]])


def test_keys_that_are_equal_within_one_run_end_it():
    cache = PrefixCache(BlockPool(4, 1))
    chain, table = chain_and_table(cache, [1, 2, 3])
    chain.keys = [b"a", b"b", b"a"]
    assert cache.publish(chain, table, 0) == 2
    cache.check_integrity()


def test_many_blocks_published_at_once_are_the_same_as_one_by_one():
    caches, ears = [PrefixCache(BlockPool(12, 2)) for _ in range(2)], [Ear(), Ear()]
    for cache, ear in zip(caches, ears, strict=True):
        cache.listeners.append(ear)
    for tokens in ([1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4, 5, 5], [1, 1, 2, 2, 3, 3, 6, 6], [7, 7]):
        states = []
        for cache, step in zip(caches, (8, 2), strict=True):
            chain, table = chain_and_table(cache, tokens)
            published = 0
            for computed in range(min(step, len(tokens)), len(tokens) + 1, step):
                table.num_tokens = computed
                published = cache.publish(chain, table, published)
            table.num_tokens = len(tokens)
            published = cache.publish(chain, table, published)
            cache.pool.release(reversed(table.blocks))
            cache.check_integrity()
            cache.pool.check_integrity()
            states.append((published, list(cache.pool._free), list(cache.pool._cached._order), list(cache._entries)))
        assert states[0] == states[1]
        assert ears[0].keys == ears[1].keys


def test_an_entry_knows_its_children_and_what_hangs_on_them():
    root, *children = (prefix.Entry(block, b"key", SPACE, b"") for block in range(4))
    grandchild = prefix.Entry(4, b"key", children[0], b"")
    assert root.descendants() == []
    children[0].adopt(grandchild)
    for count, child in enumerate(children, start=1):
        root.adopt(child)
        assert root.descendants() == [*children[:count], grandchild]
    root.disown(children[1])
    assert root.descendants() == [children[0], children[2], grandchild]
    root.disown(children[0])
    root.disown(children[2])
    assert root.descendants() == []
    root.adopt(children[1])
    assert root.descendants() == [children[1]]
    children[0].disown(grandchild)
    assert children[0].descendants() == []


# ---------------------------------------------------------------- case 13: a hash alone is never believed


BLOCK_KEY = prefix.block_key
WEAK = {
    "sha256": lambda parent, tokens: hashlib.sha256(parent + tokens).digest(),
    "one byte": lambda parent, tokens: hashlib.sha256(parent + tokens).digest()[:1],
    "two bits": lambda parent, tokens: bytes([hashlib.sha256(parent + tokens).digest()[0] & 3]),
    "the tokens alone": lambda parent, tokens: tokens,
    "a constant": lambda parent, tokens: b"",
}


@pytest.mark.parametrize("hash_name", WEAK)
def test_case_13_ids_that_agree_in_their_low_8_bits_do_not_hit(run, monkeypatch, hash_name):
    monkeypatch.setattr(prefix, "block_key", WEAK[hash_name])
    cache, serve = run(8)
    serve([65] * 4)
    assert found(cache, [65] * 4) == 1
    assert found(cache, [321] * 4) == 0
    assert serve([321] * 5) == 0


def test_case_13_an_entry_is_never_chained_to_the_wrong_past(monkeypatch):
    """With equal keys for [b][c] and [a][c], what follows [b][c] must not be found behind [a][c]."""
    monkeypatch.setattr(prefix, "block_key", WEAK["the tokens alone"])
    for grows in ([0], [1], [0, 1], [1, 0]):
        cache, written = PrefixCache(BlockPool(16, 1)), {}
        pair = [Sequence(cache, written, tokens) for tokens in ([2, 3], [1, 3])]
        for which in grows:
            pair[which].append(4)
        for first in (1, 2):
            chain = KeyChain(SPACE, 1)
            chain.extend([first, 3, 4])
            for i, hit in enumerate(cache.lookup(chain, most=3)):
                assert written[hit.block] == (SPACE, (first, 3, 4)[: i + 1])


class MostRecentlyUsed(LeastRecentlyUsed):
    """A bad policy: heads go before their tails."""

    def choose(self) -> int:
        return self._order.popitem(last=True)[0]


class PrefixMachine(RuleBasedStateMachine):
    """Random sequences over two tokens and two namespaces, so that everything shares and collides, in a pool that evicts."""

    hash_name = "sha256"

    @initialize(blocks=st.integers(3, 12), size=st.integers(1, 3), policy=st.sampled_from([LeastRecentlyUsed, MostRecentlyUsed]))
    def start(self, blocks, size, policy):
        prefix.block_key = WEAK[self.hash_name]
        self.size = size
        self.pool = BlockPool(blocks, size, policy())
        self.cache, self.ear, self.written = PrefixCache(self.pool), Ear(), {}
        self.cache.listeners.append(self.ear)
        tell_cache = self.pool.on_evict

        def evicted(block):
            self.forget(block)
            tell_cache(block)

        self.pool.on_evict = evicted
        self.live: list[Sequence] = []
        self.findable: dict[tuple[bytes, tuple[int, ...]], int] = {}  # the oracle: prefix -> block

    def forget(self, block):
        for space, gone in [known for known, where in self.findable.items() if where == block]:
            for known in list(self.findable):
                if known[0] == space and known[1][: len(gone)] == gone:
                    del self.findable[known]

    def publish(self, sequence, published_before):
        """Once another block is full, all of a sequence can be found: in its own blocks, or in those that were there before."""
        full = len(sequence.tokens) // self.size
        if full > published_before:
            for i in range(full):
                self.findable.setdefault((sequence.space, tuple(sequence.tokens[: (i + 1) * self.size])), sequence.table.blocks[i])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), space=st.sampled_from([SPACE, namespace(salt="other")]))
    def arrive(self, tokens, space):
        chain = KeyChain(space, self.size)
        chain.extend(tokens)
        hits = self.cache.lookup(chain, most=(len(tokens) - 1) // self.size)
        for i, hit in enumerate(hits):
            assert self.written[hit.block] == (space, tuple(tokens[: (i + 1) * self.size])), "another prompt's KV"
        needed = blocks_for(len(tokens), self.size) - len(hits)
        if needed > self.pool.num_free - sum(self.pool.is_evictable(hit.block) for hit in hits):
            return
        sequence = Sequence(self.cache, self.written, tokens, space)
        self.live.append(sequence)
        self.publish(sequence, len(hits))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.table.capacity_tokens == len(sequence.tokens) and not self.pool.num_free:
            return
        published = sequence.published
        sequence.append(token)
        self.publish(sequence, published)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        sequence.end()

    @rule(really=st.integers(0, 9))
    def clear(self, really):
        if not really:
            self.cache.clear()
            self.findable = {}
            for sequence in self.live:
                sequence.published = 0

    @rule(tokens=st.lists(st.integers(0, 1), max_size=12), space=st.sampled_from([SPACE, namespace(salt="other")]))
    def look(self, tokens, space):
        chain = KeyChain(space, self.size)
        chain.extend(tokens)
        hits = self.cache.lookup(chain, most=len(tokens))
        for i, hit in enumerate(hits):
            assert self.written[hit.block] == (space, tuple(tokens[: (i + 1) * self.size])), "another prompt's KV"
        if self.hash_name == "sha256":
            expected = 0
            while (space, tuple(tokens[: (expected + 1) * self.size])) in self.findable and (expected + 1) * self.size <= len(tokens):
                expected += 1
            assert len(hits) == expected

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        self.pool.check_integrity([sequence.table for sequence in self.live])
        assert self.ear.keys == set(self.cache._entries)
        if self.hash_name == "sha256":
            keys = set()
            for space, tokens in self.findable:
                chain = KeyChain(space, self.size)
                chain.extend(tokens)
                keys.add(chain.keys[-1])
            assert self.ear.keys == keys, "listeners are told exactly what can be found"

    def teardown(self):
        prefix.block_key = BLOCK_KEY


def machine(hash_name: str, examples: int) -> type:
    case = type(f"Prefix {hash_name}", (PrefixMachine,), {"hash_name": hash_name}).TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    return case


TestFindsExactlyWhatIsThere = machine("sha256", 150)
TestCase13OneByte = machine("one byte", 60)
TestCase13TwoBits = machine("two bits", 100)
TestCase13TokensAlone = machine("the tokens alone", 100)
TestCase13Constant = machine("a constant", 40)
