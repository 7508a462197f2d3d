"""The picture of chapter 4 says what the engine's arena says, whatever the controls."""

from __future__ import annotations

import re
from itertools import product

import matplotlib.pyplot
import pytest

from minikv.cache.arena import PLACEMENTS, RESERVATIONS, Arena
from minikv.classroom.explorers import car_park
from minikv.show.widgets import Explorer, png

SEEDS = car_park.CONTROLS["seed"].values
WAYS = tuple(product(RESERVATIONS, PLACEMENTS, SEEDS))


def said(reservation: str, placement: str, event: int, seed: int) -> str:
    """The summary without its figure, which takes longer."""
    return car_park.summary(car_park.history(reservation, placement, seed), car_park.trace(seed), event)


def numbers(summary: str) -> dict[str, int]:
    words = r"(\d+) of 64 slots hold a token, (\d+) are reserved for tokens to come, (\d+) will never be written, (\d+) are free"
    found = re.search(words, summary)
    assert found, summary
    return dict(zip(("held", "to_come", "never", "free"), map(int, found.groups()), strict=True))


@pytest.mark.parametrize(("reservation", "placement", "seed"), WAYS)
def test_an_arena_that_lives_through_the_events_has_the_same_numbers(reservation, placement, seed):
    """The events are read from the summaries, as a reader does, and played on an arena of our own."""
    arena, admitted, requests = Arena(64, placement), {}, car_park.trace(seed).requests
    for event in range(1, len(car_park.history(reservation, placement, seed).snapshots) + 1):
        summary = said(reservation, placement, event, seed)
        tick, name, what = re.match(r"Event \d+ of \d+, tick (\d+): ([A-L]) (.*?)\.", summary).groups()
        tick = int(tick) - (what == "leaves")  # who leaves goes before the others write this tick's token
        for owner, since in admitted.items():
            tokens = requests[ord(owner) - 65].prompt_tokens + 1 + tick - since
            arena.write(owner, tokens - arena.segment(owner).tokens)
        if what == "leaves":
            assert arena.segment(name).tokens == requests[ord(name) - 65].total_tokens
            arena.free(name)
            del admitted[name]
        elif takes := re.match(r"takes (\d+) slots for (\d+) \+ 1 tokens", what):
            arena.allocate(name, int(takes[1]))
            arena.write(name, int(takes[2]) + 1)
            admitted[name] = tick
        else:
            wanted = int(re.match(r"waits for (\d+) slots", what)[1])
            assert not arena.can_allocate(wanted)
            assert (wanted <= arena.free_slots) == ("not in one piece" in what) == ("Refused with" in summary)
            if "Refused with" in summary:
                assert f"Refused with {arena.free_slots} slots free, because the largest hole has {arena.largest_hole}" in summary
        shown = numbers(summary)
        assert sum(shown.values()) == 64
        assert shown["free"] == arena.free_slots
        assert shown["held"] == sum(segment.tokens for segment in arena.segments())
        assert shown["never"] == 0 or reservation != "oracle" or placement == "buddy"


def test_the_slider_reaches_the_end_of_every_history():
    longest = max(len(car_park.history(*way).snapshots) for way in WAYS)
    assert longest == car_park.LAST_EVENT
    for way in WAYS:
        reservation, placement, seed = way
        assert car_park.history(*way).finished == car_park.REQUESTS
        last = said(reservation, placement, len(car_park.history(*way).snapshots), seed)
        assert numbers(last) == {"held": 0, "to_come": 0, "never": 0, "free": 64}
        assert "leaves" in last.splitlines()[0]


def test_there_is_a_refusal_by_holes_to_be_seen_at_the_start():
    start = {name: control.start for name, control in car_park.CONTROLS.items()}
    picture = car_park.draw(**start)
    assert "Refused with" in picture.summary
    words = [text.get_text() for text in picture.figure.axes[0].texts]
    assert sum(text.startswith(">> ") for text in words) == 2
    assert len([text for text in words if "tick" in text]) == car_park.STRIPS


def test_compaction_refuses_nobody_whose_slots_are_free_and_says_what_it_moved():
    for reservation, seed in product(RESERVATIONS, SEEDS):
        result = car_park.history(reservation, "compaction", seed)
        summary = said(reservation, "compaction", 1, seed)
        assert result.refused_by_holes == 0
        assert f"{result.moved_tokens} tokens were moved in all." in summary
    assert "moved" not in said("oracle", "buddy", 1, 0)


def test_who_wants_a_power_of_two_is_told_so():
    ways = [(reservation, seed) for reservation, seed in product(RESERVATIONS, SEEDS)]
    events = [(*way, event) for way in ways for event in range(1, 1 + len(car_park.history(way[0], "buddy", way[1]).snapshots))]
    summaries = [said(reservation, "buddy", event, seed) for reservation, seed, event in events]
    refused = [summary for summary in summaries if "Refused with" in summary]
    assert any("must be given, a power of two" in summary for summary in refused)


def test_the_corners_of_every_control_are_drawn():
    for reservation, placement, (event, seed) in product(RESERVATIONS, PLACEMENTS, ((1, SEEDS[-1]), (car_park.LAST_EVENT, SEEDS[0]))):
        picture = car_park.draw(reservation, placement, event, seed)
        assert picture.summary == said(
            reservation, placement, min(event, len(car_park.history(reservation, placement, seed).snapshots)), seed
        )
        assert len(png(picture.figure)) > 3_000
    assert matplotlib.pyplot.get_fignums() == []


@pytest.mark.parametrize(
    ("values", "words"),
    [(("half", "first_fit", 1, 0), "no reservation 'half'"), (("oracle", "worst_fit", 1, 0), "no placement 'worst_fit'")],
)
def test_other_words_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        car_park.draw(*values)


@pytest.mark.parametrize("event", [0, -1, 35])
def test_an_event_that_is_not_on_the_slider_is_refused(event):
    with pytest.raises(ValueError, match="event 1 to 34"):
        car_park.draw("oracle", "first_fit", event, 0)


def test_the_controls_start_where_they_can():
    explorer = Explorer(car_park.draw, car_park.CONTROLS)
    explorer.fields["placement"].value = "compaction"
    explorer.fields["event"].value = 34
    assert "tokens were moved in all" in explorer.view.value
