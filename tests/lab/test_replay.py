"""Replaying a trace: counts by hand, Belady against brute force, and broken files."""

from __future__ import annotations

import gc
import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minikv
from minikv.lab.replay import BLOCK_TOKENS, capacity_curve, read_trace, replay


def line(ids: list[int], **more: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": len(ids) * BLOCK_TOKENS - 7, "output_length": 3, "hash_ids": ids} | more)


def write(tmp_path, *lines: str):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_without_a_limit_every_block_that_came_before_is_found(tmp_path):
    requests = read_trace(write(tmp_path, line([0, 1, 2]), line([0, 1, 3]), line([4]), "", line([0, 1, 2])))
    found = replay(requests)
    assert (found.blocks, found.block_hits, found.evictions) == (10, 5, 0)
    assert found.hit_rate == 0.5


def test_lru_fifo_and_optimal_by_hand():
    # Room for two blocks. LRU keeps what was used last; FIFO forgets 0 although it is used all the time.
    requests = [[0], [1], [0], [2], [0], [1]]
    assert replay(requests, 2 * BLOCK_TOKENS, "lru").block_hits == 2  # the second and third 0
    assert replay(requests, 2 * BLOCK_TOKENS, "fifo").block_hits == 1
    assert replay(requests, 2 * BLOCK_TOKENS, "optimal").block_hits == 2


def test_a_rotation_defeats_lru_and_not_belady():
    requests = [[number % 4] for number in range(40)]
    assert replay(requests, 3 * BLOCK_TOKENS, "lru").block_hits == 0
    assert replay(requests, 3 * BLOCK_TOKENS, "optimal").block_hits > 20
    assert replay(requests, 4 * BLOCK_TOKENS, "lru").block_hits == 36


TREE = [[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5]]  # prompts over a small tree of prefixes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(TREE), min_size=1, max_size=7), st.integers(3, 5))
def test_no_policy_beats_optimal(requests, room):
    best = replay(requests, room * BLOCK_TOKENS, "optimal").block_hits
    assert best == _best_of_all(requests, room)
    for policy in ("lru", "fifo"):
        assert replay(requests, room * BLOCK_TOKENS, policy).block_hits <= best


def _best_of_all(requests: list[list[int]], room: int) -> int:
    """Try every choice of what to keep after each request (only whole prefixes can be found again)."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    parents = {0: None, 1: 0, 2: 1, 3: 0, 4: None, 5: 4}
    for ids in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = 0
            while found < len(ids) and ids[found] in kept:
                found += 1
            others = [block for block in kept if block not in ids]
            for choice in product((0, 1), repeat=len(others)):
                held = frozenset(ids) | {block for block, keep in zip(others, choice, strict=True) if keep}
                closed = all(parents[block] is None or parents[block] in held for block in held)
                if len(held) <= room and closed:
                    after[held] = max(after.get(held, 0), hits + found)
        states = after
    return max(states.values())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(TREE), min_size=1, max_size=20), st.integers(1, 6))
def test_lru_finds_and_evicts_what_a_plain_list_does(requests, room):
    """The oracle has no pool and no index: only the ids, in the order of their last use, a tail before its head."""
    order: list[int] = []
    blocks = hits = evictions = 0
    for ids in requests:
        blocks += len(ids)
        ids = ids[:room]
        found = [each for place, each in enumerate(ids) if set(ids[: place + 1]) <= set(order)]
        hits += len(found)
        order = [each for each in order if each not in found]
        too_many = max(0, len(order) + len(ids) - room)
        evictions += too_many
        order = order[too_many:] + ids[::-1]
    found = replay(requests, room * BLOCK_TOKENS)
    assert (found.blocks, found.block_hits, found.evictions) == (blocks, hits, evictions)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        replay([[0, 1], [0, 2]], BLOCK_TOKENS)
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError):
            replay([[0]], on_request=lambda: 1 // 0)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_more_room_finds_no_less_and_the_curve_ends_at_the_whole():
    requests = [[0, 1, 2], [3, 4], [0, 1, 5], [3, 4], [0, 1, 2], [6], [3, 4, 7]] * 3
    curve = capacity_curve(requests, points=6)
    for policy in ("lru", "optimal"):
        rates = [rate for _, rate in curve[policy]]
        assert rates == sorted(rates)
        assert rates[-1] == replay(requests).hit_rate


def test_a_prompt_longer_than_the_cache_is_still_counted():
    found = replay([[0, 1, 2, 3], [0, 1, 2, 3]], 2 * BLOCK_TOKENS)
    assert (found.blocks, found.block_hits) == (8, 2)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "JSON object"),
        ('{"input_length": 5}', "hash_ids"),
        (line([3], input_length=0), "input_length"),
        (line([3], input_length=True), "input_length"),
        (line([3], input_length=513), "2 blocks"),
        (line([3], hash_ids=["3"]), "whole numbers"),
        (line([3], hash_ids=[1.0]), "whole numbers"),
        (line([0, 0]), "twice"),
        (line([9, 1]), "follows 9"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path, bad, said):
    path = write(tmp_path, line([0, 1]), line([0]), bad, line([0, 1]))
    with pytest.raises(minikv.RequestError, match="line 3") as refused:
        read_trace(path)
    assert said in str(refused.value)


def test_what_is_no_trace_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("empty.jsonl", "bytes.jsonl", "missing.jsonl"):
        with pytest.raises(minikv.RequestError, match=name):
            read_trace(tmp_path / name)
    with pytest.raises(minikv.RequestError, match="holds no block"):
        replay([[0]], 511)
    with pytest.raises(minikv.RequestError, match="lru, fifo, optimal"):
        replay([[0]], 512, "random")


def test_ids_of_64_bits_and_more_are_ids(tmp_path):
    requests = read_trace(write(tmp_path, line([2**63, -5]), line([2**63, -5])))
    assert replay(requests).block_hits == 2
    with pytest.raises(minikv.RequestError, match="line 1"):
        read_trace(write(tmp_path, line([2**130])))
