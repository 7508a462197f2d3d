"""Chapter 4: one small memory, a dozen requests, and the two choices: how much to reserve, and where to put it.

The engine's own simulation (``minikv.lab.car_park``, over ``minikv.cache.arena``) runs the whole history; the picture shows
the memory after each of the last few events, the newest at the bottom. A letter stands in the slots that an owner has
written; hatched is what it will write, cross-hatched what it never will; a hole is white. A request that is refused
although its slots are free in total is marked, and so are the holes that together would have been enough.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from typing import Any

from minikv.cache.arena import PLACEMENTS, RESERVATIONS, Arena, Segment
from minikv.lab.car_park import Request, Result, Snapshot, Trace, simulate
from minikv.show.plots import DARK, LIGHT, MIDDLE
from minikv.show.widgets import Choice, Picture, Slider

SLOTS, MAX_TOKENS, REQUESTS = 64, 24, 12
STRIPS = 8  # events that are drawn: the chosen one and those before it
LAST_EVENT = 34  # of the longest history
BY_HOLES = "enough are free, but not in one piece"
SHADES = ("#f0f0f0", "#d4d4d4", "#b8b8b8")

CONTROLS = {
    "reservation": Choice("Reserve", tuple(RESERVATIONS), "oracle"),
    "placement": Choice("Place", PLACEMENTS, "first_fit"),
    "event": Slider("Event", tuple(range(1, LAST_EVENT + 1)), 10),
    "seed": Slider("Requests (seed)", (0, 1, 2, 3, 4, 5), 4),
}


def trace(seed: int) -> Trace:
    """A dozen small requests that come faster than they leave. The same seed, the same requests."""
    rng = random.Random(seed)
    arrivals = sorted(rng.randrange(12) for _ in range(REQUESTS))
    return Trace(tuple(Request(at, rng.randint(2, 8), rng.randint(1, MAX_TOKENS - 8)) for at in arrivals), MAX_TOKENS)


@lru_cache(maxsize=64)
def history(reservation: str, placement: str, seed: int) -> Result:
    """The whole run, every event of it."""
    return simulate(trace(seed), SLOTS, reservation, placement, snapshots=10_000)


def draw(reservation: str, placement: str, event: int, seed: int) -> Picture:
    """The memory after each of the last events up to number ``event`` (the last one, if there are fewer).

    ValueError for an event that no history has, and for an unknown reservation or placement.
    """
    if not 1 <= event <= LAST_EVENT:
        raise ValueError(f"choose event 1 to {LAST_EVENT}, not {event}")
    result, requests = history(reservation, placement, seed), trace(seed)
    event = min(event, len(result.snapshots))
    shown = list(enumerate(result.snapshots[:event], start=1))[-STRIPS:]
    return Picture(_figure(shown, requests, f"{reservation}, {placement}"), summary(result, requests, event))


def _letter(name: int) -> str:
    return chr(ord("A") + name)


def _said(snapshot: Snapshot) -> str:
    return re.sub(r"request (\d+)", lambda found: _letter(int(found[1])), snapshot.event)


def _parts(segment: Segment, requests: Trace) -> tuple[int, int, int]:
    """Of a piece that somebody owns: slots written, slots that will be, slots that never will be."""
    total = requests.requests[int(str(segment.owner))].total_tokens
    to_come = min(segment.length, total) - segment.tokens
    return segment.tokens, to_come, segment.length - segment.tokens - to_come


def summary(result: Result, requests: Trace, event: int) -> str:
    """In words and numbers: what happened, what each slot is now, and how the whole history ends."""
    snapshot = result.snapshots[event - 1]
    parts = [_parts(segment, requests) for segment in snapshot.segments if segment.owner is not None]
    held, to_come, never = (sum(part) for part in zip(*parts, strict=True)) if parts else (0, 0, 0)
    holes = [segment.length for segment in snapshot.segments if segment.owner is None]
    free = sum(holes)
    said = f"Event {event} of {len(result.snapshots)}, tick {snapshot.tick}: {_said(snapshot)}."
    if BY_HOLES in snapshot.event:
        rounded = Arena(SLOTS, result.placement).rounded(_wanted(snapshot))
        up = f" (and {rounded} must be given, a power of two)" if rounded != _wanted(snapshot) else ""
        said += f" Refused with {free} slots free, because the largest hole has {max(holes)}{up}."
    places = f"{free} are free" + (f" in holes of {', '.join(map(str, holes))}" if holes else "")
    moved = f" {result.moved_tokens} tokens were moved in all." if result.placement == "compaction" else ""
    return (
        f"{said}\n{held} of {SLOTS} slots hold a token, {to_come} are reserved for tokens to come, {never} will never be written, "
        f"{places}. Waiting: {snapshot.waiting}.\n"
        f"The whole history with {result.name}: {result.waited} of {REQUESTS} had to wait, {result.refused_by_holes} of them although "
        f"enough was free in total, and the last one leaves at tick {result.snapshots[-1].tick}.{moved}"
    )


def _wanted(snapshot: Snapshot) -> int:
    found = re.search(r"for (\d+) slots", snapshot.event)
    return int(found[1]) if found else 0


def _figure(shown: list[tuple[int, Snapshot]], requests: Trace, title: str) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    axis = figure.subplots()
    axis.set_xlim(-0.3, SLOTS + 0.3)
    axis.set_ylim(STRIPS + 0.1, -0.05)
    axis.axis("off")
    axis.set_title(
        f"{title}: {SLOTS} slots after each event (letter: written; /// to come; xxx never written; white: free)", loc="left", fontsize=9
    )
    for row, (number, snapshot) in enumerate(shown):
        newest = number == shown[-1][0]
        refused = BY_HOLES in snapshot.event
        words = f"{'>> ' if refused else ''}{number}. tick {snapshot.tick}: {_said(snapshot)}"
        axis.text(0, row + 0.36, words, fontsize=8, va="bottom", weight="bold" if newest or refused else "normal")
        for segment in snapshot.segments:
            if segment.owner is None:
                continue
            written, to_come, never = _parts(segment, requests)
            shade = SHADES[int(str(segment.owner)) % len(SHADES)]
            left, top = segment.start, row + 0.42
            for length, face, hatch in ((written, shade, None), (to_come, "white", "////"), (never, "white", "xxxx")):
                if length:
                    axis.add_patch(Rectangle((left, top), length, 0.46, facecolor=face, edgecolor=MIDDLE, hatch=hatch, linewidth=0.4))
                left += length
            axis.add_patch(Rectangle((segment.start, top), segment.length, 0.46, fill=False, edgecolor=DARK, linewidth=1.1))
            axis.text(
                segment.start + max(written, 1) / 2,
                top + 0.24,
                _letter(int(str(segment.owner))),
                ha="center",
                va="center",
                fontsize=9,
                weight="bold",
            )
        for hole in (segment for segment in snapshot.segments if segment.owner is None):
            edge, width, dashes = (DARK, 2.0, "--") if refused else (LIGHT, 0.8, "-")
            axis.add_patch(
                Rectangle((hole.start, row + 0.42), hole.length, 0.46, fill=False, edgecolor=edge, linewidth=width, linestyle=dashes)
            )
            if refused:
                axis.text(hole.start + hole.length / 2, row + 0.66, str(hole.length), ha="center", va="center", fontsize=8)
    return figure
