"""The explorer of chapter 8: its stored curves against a fresh simulation, its words against the arithmetic."""

from __future__ import annotations

import itertools
import re

import matplotlib.pyplot as plt
import pytest

from minikv.classroom.explorers import cliff_explorer as explorer
from minikv.show.widgets import Picture, png

CORNERS = list(
    itertools.product(
        (explorer.SESSIONS[0], explorer.SESSIONS[-1]),
        (explorer.POOLS[0], explorer.POOLS[-1]),
        (explorer.SHARES[0], explorer.SHARES[-1]),
        (explorer.THINK_TIMES_S[0], explorer.THINK_TIMES_S[-1]),
    )
)


@pytest.mark.parametrize(
    ("pool", "share", "think", "sessions"),
    [(4, 0, 0, 4), (4, 0, 0, 5), (4, 0, 60, 24), (6, 50, 0, 11), (6, 50, 0, 12), (8, 25, 10, 11), (8, 75, 60, 24), (6, 75, 10, 1)],
)
def test_the_stored_curves_are_what_the_simulator_gives(pool: int, share: int, think: int, sessions: int) -> None:
    again = explorer.numbers(explorer.scenario(pool, share, think).run(sessions))
    assert explorer.stored()[explorer.name(pool, share, think)][sessions - 1] == pytest.approx(again, abs=2e-4)


def test_there_is_a_point_for_every_place_of_the_controls() -> None:
    wanted = {explorer.name(*values) for values in itertools.product(explorer.POOLS, explorer.SHARES, explorer.THINK_TIMES_S)}
    assert set(explorer.stored()) == wanted
    for name, curve in explorer.stored().items():
        assert len(curve) == len(explorer.SESSIONS), name
        assert all(0 < p50 <= p99 and 0 <= hit <= 1 for p50, p99, hit in curve), name
    assert {name: list(control.values) for name, control in explorer.CONTROLS.items()} == {
        "sessions": list(explorer.SESSIONS),
        "pool": list(explorer.POOLS),
        "share": list(explorer.SHARES),
        "think_time_s": list(explorer.THINK_TIMES_S),
    }


@pytest.mark.parametrize(("pool", "share"), list(itertools.product(explorer.POOLS, explorer.SHARES)))
def test_the_arithmetic_of_shared_memory(pool: int, share: int) -> None:
    shared = explorer.SESSION_TOKENS * share // 100
    chosen = explorer.scenario(pool, share)
    assert chosen.workload.system_tokens + chosen.workload.own_tokens == explorer.SESSION_TOKENS
    assert chosen.fits == (pool * explorer.SESSION_TOKENS - shared) // (explorer.SESSION_TOKENS - shared)


@pytest.mark.parametrize("think", explorer.THINK_TIMES_S)
@pytest.mark.parametrize(("pool", "share"), list(itertools.product(explorer.POOLS, explorer.SHARES)))
def test_the_stored_hit_rate_falls_behind_the_last_session_that_fits(pool: int, share: int, think: int) -> None:
    fits = explorer.scenario(pool, share).fits
    hits = [hit for _, _, hit in explorer.stored()[explorer.name(pool, share, think)]]
    assert len(set(hits[:fits])) == 1
    beyond = hits[fits + 1 :]  # with one more, what is left beside the whole sessions may still do
    assert all(hit < hits[0] for hit in beyond)


@pytest.mark.parametrize(("sessions", "pool", "share", "think"), [*CORNERS, (11, 6, 50, 0), (12, 6, 50, 0)])
def test_the_picture_says_what_the_simulator_did(sessions: int, pool: int, share: int, think: int) -> None:
    picture = explorer.draw(sessions=sessions, pool=pool, share=share, think_time_s=think)
    assert isinstance(picture, Picture)
    chosen = explorer.scenario(pool, share, think)
    row = chosen.run(sessions)
    said = re.search(r"p50 ([\d.]+) s, p99 ([\d.]+) s\. Hit rate ([\d.]+)% of ([\d.]+)%", picture.summary)
    assert said is not None
    assert [float(each) for each in said.groups()] == pytest.approx(
        [row.p50_ttft_s, row.p99_ttft_s, 100 * row.hit_rate, 100 * row.best_hit_rate], abs=0.06
    )
    assert f"of {chosen.fits} sessions" in picture.summary
    assert ("all fit" in picture.summary) == (sessions <= chosen.fits)
    assert png(picture.figure).startswith(b"\x89PNG")
    assert plt.get_fignums() == []


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"sessions": 25}, {"pool": 5}, {"share": 33}, {"think_time_s": -1}])
def test_a_value_that_is_on_no_curve_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="choose one of"):
        explorer.draw(**{"sessions": 11, "pool": 6, "share": 50, "think_time_s": 0} | wrong)
