"""Contiguous memory: nothing overlaps, nothing is lost, holes merge, and whoever is refused is told the numbers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minikv.cache.arena import PLACEMENTS, Arena, Segment, maximum, oracle, power_of_two, power_of_two_above
from minikv.cache.blocks import BlockPool

ONE_PIECE = [placement for placement in PLACEMENTS if placement != "compaction"]


def quarters(placement: str) -> Arena:
    """CASES row 8: 16 slots, four owners of 4, the first and the third gone."""
    arena = Arena(16, placement)
    for owner in "abcd":
        arena.allocate(owner, 4)
        arena.write(owner, 3)
    arena.free("a")
    arena.free("c")
    return arena


# ---------------------------------------------------------------- how much to reserve


def test_100_of_1024_tokens_leave_924_slots_unused():
    arena = Arena(1024)
    arena.allocate("request", maximum(60, 40, 1024))
    arena.write("request", 100)
    piece = arena.segment("request")
    assert piece.length - piece.tokens == 924
    assert round(100 * 924 / 1024, 1) == 90.2


@pytest.mark.parametrize(("output", "reserved"), [(1, 1), (2, 2), (16, 16), (17, 32), (25, 32), (32, 32), (33, 64)])
def test_power_of_two_reserves_for_the_output_at_most_twice_its_length(output, reserved):
    assert power_of_two_above(output) == reserved < 2 * output
    assert power_of_two(100, output, 2048) == 100 + reserved
    assert oracle(100, output, 2048) == 100 + output


def test_power_of_two_stops_at_the_maximum():
    assert power_of_two(900, 100, 1024) == 1024


# ---------------------------------------------------------------- where to put it


@pytest.mark.parametrize("placement", ONE_PIECE)
def test_case_8_eight_free_slots_in_two_holes_of_four_are_refused(placement):
    arena = quarters(placement)
    before = arena.segments()
    assert (arena.free_slots, arena.largest_hole) == (8, 4)
    assert not arena.can_allocate(8)
    with pytest.raises(MemoryError, match=r"wants 8 slots .* 8 of 16 are free in total and the largest hole has 4"):
        arena.allocate("e", 8)
    assert arena.segments() == before


def test_case_8_compaction_and_pages_serve_it():
    arena = quarters("compaction")
    assert arena.allocate("e", 8) == 8
    assert arena.moved_tokens == 6  # 3 written tokens of b and of d; their fourth slots are empty
    assert arena.segments() == [Segment("b", 0, 4, 3), Segment("d", 4, 4, 3), Segment("e", 8, 8, 0)]
    pool = BlockPool(4, 4)
    owners = [pool.allocate_many(1) for _ in range(4)]
    pool.release([*owners[0], *owners[2]])
    assert len(pool.allocate_many(2)) == 2


@pytest.mark.parametrize("placement", ["first_fit", "best_fit", "compaction"])
def test_512_wanted_of_600_free_in_pieces(placement):
    arena = Arena(1200, placement)
    for owner in range(12):
        arena.allocate(owner, 100)
        arena.write(owner, 5 * owner)
    for owner in range(0, 12, 2):
        arena.free(owner)
    assert (arena.free_slots, arena.largest_hole) == (600, 100)
    if placement == "compaction":
        assert arena.allocate("new", 512) == 600
        assert arena.moved_tokens == sum(5 * owner for owner in range(1, 12, 2))
        assert arena.compactions == 1
    else:
        with pytest.raises(MemoryError, match=r"wants 512 slots .* 600 of 1200 are free in total and the largest hole has 100"):
            arena.allocate("new", 512)
    arena.check_integrity()


@pytest.mark.parametrize(("placement", "start"), [("first_fit", 0), ("compaction", 0), ("best_fit", 10)])
def test_best_fit_takes_the_smallest_hole_and_first_fit_the_first(placement, start):
    arena = Arena(20, placement)
    for owner, slots in (("big", 8), ("x", 2), ("small", 4), ("y", 6)):
        arena.allocate(owner, slots)
    arena.free("big")
    arena.free("small")
    assert arena.allocate("new", 3) == start
    assert [hole.length for hole in arena.holes()] == ([5, 4] if start == 0 else [8, 1])


def test_best_fit_takes_the_lower_of_two_equal_holes():
    arena = Arena(12, "best_fit")
    for owner in "abcd":
        arena.allocate(owner, 3)
    arena.free("c")
    arena.free("a")
    assert arena.allocate("new", 2) == 0


def test_buddies_are_halved_and_merge_again():
    arena = Arena(16, "buddy")
    assert [arena.allocate(owner, slots) for owner, slots in (("a", 3), ("b", 1), ("c", 5))] == [0, 4, 8]
    assert [tuple(hole) for hole in arena.holes()] == [(None, 5, 1, 0), (None, 6, 2, 0)]
    arena.free("b")
    assert arena.holes() == [Segment(None, 4, 4)]
    arena.free("c")
    assert arena.holes() == [Segment(None, 4, 4), Segment(None, 8, 8)]  # neighbours, but not buddies
    with pytest.raises(MemoryError, match=r"9 slots in one piece \(rounded up to 16\), but 12 of 16 are free .* largest hole has 8"):
        arena.allocate("d", 9)
    arena.free("a")
    assert arena.holes() == [Segment(None, 0, 16)]


def test_a_memory_that_is_no_power_of_two_begins_as_several_buddies():
    arena = Arena(15_700, "buddy")
    sizes = [hole.length for hole in arena.holes()]
    assert sizes == [8192, 4096, 2048, 1024, 256, 64, 16, 4]
    assert [arena.allocate(owner, 2048) for owner in range(7)] == [12288, 8192, 10240, 0, 2048, 4096, 6144]
    with pytest.raises(MemoryError, match=r"1364 of 15700 .* largest hole has 1024"):
        arena.allocate(7, 2048)
    for owner in range(7):
        arena.free(owner)
    assert [hole.length for hole in arena.holes()] == sizes


# ---------------------------------------------------------------- misuse


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_misuse_is_refused_with_numbers_and_changes_nothing(placement):
    arena = Arena(16, placement)
    arena.allocate("a", 4)
    arena.write("a", 2)
    before = arena.segments()
    for call, message in (
        (lambda: arena.allocate("a", 1), "'a' cannot be given slots"),
        (lambda: arena.allocate(None, 1), "None cannot be given slots"),
        (lambda: arena.allocate("b", 0), "at least one slot, not 0"),
        (lambda: arena.write("a", 3), "cannot write 3 tokens: 2 of its 4"),
        (lambda: arena.write("a", -1), "cannot write -1 tokens"),
        (lambda: arena.write("b"), "'b' owns nothing"),
        (lambda: arena.free("b"), "'b' owns nothing"),
        (lambda: arena.segment("b"), "'b' owns nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(MemoryError, match="wants 17 slots"):
        arena.allocate("b", 17)
    assert arena.segments() == before
    arena.check_integrity()


def test_an_arena_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="at least one slot, not 0"):
        Arena(0)
    with pytest.raises(ValueError, match="no placement 'worst_fit'; choose one of first_fit"):
        Arena(4, "worst_fit")


def test_the_integrity_check_checks():
    for spoil, message in (
        (lambda a: a._holes.append((0, 4)), "overlap"),
        (lambda a: a._holes.pop(), "of 16"),
        (lambda a: a._live["b"].__setattr__("tokens", 9), "9 tokens in 4 slots"),
        (lambda a: a.__setattr__("free_slots", 3), "3 slots are said to be free, 8 are"),
        (lambda a: a.__setattr__("_holes", [(0, 2), (2, 2), (8, 4)]), "belong together"),
    ):
        arena = quarters("first_fit")
        arena.check_integrity()
        if message == "of 16":
            arena.free("d")
        spoil(arena)
        with pytest.raises(AssertionError, match=message):
            arena.check_integrity()


# ---------------------------------------------------------------- any history


class Histories(RuleBasedStateMachine):
    """Owners come, write and leave in any order; a real memory of tokens follows every move."""

    @initialize(slots=st.integers(1, 70), placement=st.sampled_from(PLACEMENTS))
    def begin(self, slots, placement):
        self.arena = Arena(slots, placement)
        self.twin = Arena(slots, placement)
        self.memory: list[tuple[int, int] | None] = [None] * slots
        self.written: dict[int, int] = {}
        self.names = 0
        self.copied = 0

        def move(owner, old, new, tokens):
            assert new < old
            assert tokens == self.written[owner] > 0
            for token in range(tokens):  # upwards, one by one, in place
                self.memory[new + token] = self.memory[old + token]
            self.copied += tokens

        self.arena.on_move = move

    @rule(slots=st.integers(1, 40))
    def come(self, slots):
        arena, before = self.arena, self.arena.segments()
        taken = power_of_two_above(slots) if arena.placement == "buddy" else slots
        fits = taken <= (arena.free_slots if arena.placement == "compaction" else max((h.length for h in arena.holes()), default=0))
        assert arena.can_allocate(slots) == fits
        if not fits:
            with pytest.raises(MemoryError, match=f"{slots} .* {arena.free_slots} of {arena.slots} .* {arena.largest_hole}"):
                arena.allocate(self.names, slots)
            assert arena.segments() == before
            return
        holes = [s for s in before if s.owner is None and s.length >= taken]
        start = arena.allocate(self.names, slots)
        assert start == self.twin.allocate(self.names, slots)  # the same history, the same place
        if holes and arena.placement in ("first_fit", "compaction"):
            assert start == holes[0].start
        elif holes:
            assert start == min(holes, key=lambda hole: (hole.length, hole.start)).start
        assert arena.segment(self.names) == Segment(self.names, start, taken, 0)
        self.written[self.names] = 0
        self.names += 1

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def write(self, data):
        owner = data.draw(st.sampled_from(sorted(self.written)))
        piece = self.arena.segment(owner)
        tokens = data.draw(st.integers(0, piece.length - piece.tokens))
        for arena in (self.arena, self.twin):
            arena.write(owner, tokens)
        for token in range(piece.tokens, piece.tokens + tokens):
            self.memory[piece.start + token] = (owner, token)
        self.written[owner] += tokens

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def leave(self, data):
        owner = data.draw(st.sampled_from(sorted(self.written)))
        for arena in (self.arena, self.twin):
            arena.free(owner)
        del self.written[owner]

    @precondition(lambda self: self.written)
    @rule()
    def all_leave(self):
        for owner in list(self.written):
            for arena in (self.arena, self.twin):
                arena.free(owner)
        self.written = {}
        assert self.arena.holes() == Arena(self.arena.slots, self.arena.placement).holes()  # all merged again

    @invariant()
    def everything_is_in_its_place(self):
        self.arena.check_integrity()
        assert self.arena.segments() == self.twin.segments()
        assert self.arena.moved_tokens == self.copied
        assert {s.owner: s.tokens for s in self.arena.segments() if s.owner is not None} == self.written
        for owner, tokens in self.written.items():
            start = self.arena.segment(owner).start
            assert self.memory[start : start + tokens] == [(owner, token) for token in range(tokens)]


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
