"""The car park: every slot is counted at every tick, pages are refused nothing that fits, and the order is the paper's."""

from __future__ import annotations

import math
import random
from time import process_time

import pytest

from minikv.cache.arena import PLACEMENTS, RESERVATIONS
from minikv.cache.blocks import blocks_for
from minikv.lab.car_park import PAPER_SLOTS, Request, Trace, chats, compare, simulate, table

WAYS = [*((reservation, placement) for reservation in RESERVATIONS for placement in PLACEMENTS), ("paged", "first_fit")]


def small(seed: int, shared: int = 0) -> Trace:
    rng = random.Random(seed)
    arrivals = sorted(rng.randrange(30) for _ in range(25))
    return Trace(tuple(Request(at, shared + rng.randint(1, 12), rng.randint(1, 16)) for at in arrivals), 32 + shared, shared)


@pytest.fixture(scope="module")
def default():
    return {(result.reservation, result.placement): result for result in compare()}


# ---------------------------------------------------------------- what the paper shows


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_order_is_the_papers_with_every_placement(default, placement):
    held = [default[reservation, placement].held for reservation in ("maximum", "power_of_two", "oracle")]
    assert held == sorted(held)
    assert len(set(held)) == 3
    assert held[-1] < default["paged", "blocks of 16"].held


def test_each_way_wastes_in_its_own_way(default):
    paged = default["paged", "blocks of 16"]
    assert paged.held > 0.9
    assert paged.refused_by_holes == paged.moved_tokens == 0
    assert 15_700 * (paged.reserved + paged.internal) < 16 * paged.mean_requests  # less than a block per request
    for (reservation, placement), result in default.items():
        assert (result.internal == 0) == (reservation == "oracle") or reservation == "paged"
        assert (result.rounding > 0) == (placement == "buddy" and reservation != "maximum")  # 2,048 is a power of two
        assert (result.moved_tokens > 0) == (placement == "compaction" and reservation != "maximum")
        assert result.preemptions == 0 or reservation == "paged"
    for reservation in ("power_of_two", "oracle"):
        compacted = default[reservation, "compaction"]
        assert compacted.refused_by_holes == 0 < default[reservation, "first_fit"].refused_by_holes
        assert compacted.external < min(default[reservation, other].external for other in ("first_fit", "best_fit", "buddy"))


def test_the_table_has_a_line_for_each(default):
    lines = table(list(default.values())).splitlines()
    assert len(lines) == 1 + len(WAYS)
    assert lines[-1].startswith("paged, blocks of 16")
    assert {len(line) for line in lines} == {110}  # as wide as a notebook's page


# ---------------------------------------------------------------- any trace


@pytest.mark.parametrize(("reservation", "placement"), WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_every_slot_is_counted_at_every_tick_and_every_request_ends(reservation, placement, seed):
    trace = small(seed, shared=seed)
    result = simulate(trace, 100, reservation, placement, block_size=4, snapshots=10_000)
    assert result == simulate(small(seed, shared=seed), 100, reservation, placement, block_size=4, snapshots=10_000)
    assert all(sum(usage) == 100 and min(usage) >= 0 for usage in result.usage)
    assert math.isclose(result.held + result.reserved + result.internal + result.external, 1)
    assert 0 <= result.duplicate <= result.held
    assert result.finished == 25
    assert result.usage[-1] == (0, 0, 0, 0, 100)
    assert sum(usage.held for usage in result.usage) == sum(held_ticks(trace, result))
    for snapshot in result.snapshots:
        assert [s.start for s in snapshot.segments] == [0, *(s.start + s.length for s in snapshot.segments[:-1])]
        assert sum(segment.length for segment in snapshot.segments) == 100
        assert all(0 <= segment.tokens <= segment.length for segment in snapshot.segments)
        assert all(tokens <= trace.requests[name].total_tokens for name, tokens in snapshot.tokens.items())
    leavers = [snapshot.event for snapshot in result.snapshots if snapshot.event.endswith("leaves")]
    assert sorted(leavers) == sorted(f"request {name} leaves" for name in range(25))


def held_ticks(trace: Trace, result) -> list[int]:
    """Token-ticks: the token counts that a request goes through, from its first to all of them, each for a tick.

    Being preempted costs none of them twice: the request goes on with the next count.
    """
    return [sum(range(request.prompt_tokens + 1, request.total_tokens + 1)) for request in trace.requests]


@pytest.mark.parametrize("seed", range(20))
def test_pages_never_refuse_a_request_for_which_blocks_suffice(seed):
    trace = small(seed)
    result = simulate(trace, 60, "paged", block_size=4, snapshots=10_000)
    assert result.refused_by_holes == 0
    for snapshot in result.snapshots:
        if "waits for" in snapshot.event:
            name, wanted = int(snapshot.event.split()[1]), int(snapshot.event.split()[4])
            assert wanted >= 4 * blocks_for(trace.requests[name].prompt_tokens + 1, 4)
            assert wanted > sum(segment.length for segment in snapshot.segments if segment.owner is None)


@pytest.mark.parametrize("placement", ["first_fit", "best_fit", "buddy"])
def test_a_request_that_only_holes_keep_out(placement):
    """CASES row 8 as a trace: the first and the third of four leave, and the fifth wants their 8 slots."""
    requests = (Request(0, 3, 1), Request(0, 1, 3), Request(0, 3, 1), Request(0, 1, 3), Request(1, 1, 7))
    trace = Trace(requests, 8)
    refused = simulate(trace, 16, "oracle", placement)
    assert refused.refused_by_holes == 1
    assert [s.tick for s in refused.snapshots if "enough are free, but not in one piece" in s.event] == [1]
    compacted = simulate(trace, 16, "oracle", "compaction")
    assert (compacted.refused_by_holes, compacted.waited, compacted.moved_tokens) == (0, 0, 3 + 3)
    assert simulate(trace, 16, "paged", block_size=4).waited == 0


def test_one_request_of_100_in_1024():
    result = simulate(Trace((Request(0, 99, 1),), 1024), 1024, "maximum")
    assert (result.internal, result.held) == (924 / 1024, 100 / 1024)


def test_a_shared_prompt_is_stored_once_for_each_request():
    requests = tuple(Request(0, 10, 1) for _ in range(3))
    assert simulate(Trace(requests, 20, shared_prefix_tokens=8), 100, "oracle", ticks=1).duplicate == 16 / 100
    assert simulate(chats(100, shared_prefix_tokens=50), reservation="oracle").duplicate > 0.02


# ---------------------------------------------------------------- traces, and misuse


def test_the_default_trace_is_what_its_docstring_says():
    assert chats() == chats(500, seed=0) != chats(500, seed=1)
    many = chats(20_000, seed=3).requests
    assert sum(request.prompt_tokens for request in many) / 20_000 == pytest.approx(155, rel=0.03)
    assert sum(request.output_tokens for request in many) / 20_000 == pytest.approx(302, rel=0.03)
    assert many[-1].arrival == pytest.approx(20_000 / 0.2, rel=0.03)


def test_a_simulation_takes_well_under_a_second():
    best = math.inf
    for _ in range(3):
        began = process_time()
        simulate(chats(), PAPER_SLOTS, "oracle", "buddy")
        best = min(best, process_time() - began)
    assert best < 2  # about 0.3 s on an idle machine


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Request(0, 0, 1), "a token in and a token out"),
        (lambda: Trace((), 8), "at least one request"),
        (lambda: Trace((Request(1, 1, 1), Request(0, 1, 1)), 8), "in the order of arrival"),
        (lambda: Trace((Request(0, 5, 4),), 8), "request 0 does not fit self.max_tokens=8"),
        (lambda: Trace((Request(0, 5, 3),), 8, 6), "self.shared_prefix_tokens=6"),
        (lambda: chats(0), "count=0"),
        (lambda: chats(max_tokens=100), "max_tokens=100"),
        (lambda: simulate(chats(3), 1024), "request 0 never fits into 1024 slots with maximum, first_fit"),
        (lambda: simulate(Trace((Request(0, 5, 4),), 9), 12, "oracle", "buddy"), "never fits into 12 slots"),
        (lambda: simulate(Trace((Request(0, 5, 4),), 9), 11, "paged", block_size=4), "never fits into 11 slots"),
        (lambda: simulate(chats(3), reservation="minimum"), "no reservation 'minimum'; choose one of maximum"),
        (lambda: simulate(chats(3), placement="worst_fit"), "no placement 'worst_fit'"),
        (lambda: simulate(chats(3), ticks=0), "ticks=0"),
        (lambda: simulate(chats(3), reservation="paged", block_size=0), "block_size=0"),
    ],
)
def test_misuse_is_refused_with_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call()
