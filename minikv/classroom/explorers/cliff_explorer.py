"""The cliff, moved by hand: how many sessions, how much memory, how long they think, how much of a session all share.

The setting is that of the published experiment in small: Qwen3-4B on an L4, weights and cache in fp8, sessions that end
with 16,000 tokens after eight turns. Memory is given in whole sessions that share nothing; what is shared is there once,
so the more is shared, the more sessions fit. The curves were simulated once and lie in ``cliff_explorer.json`` beside this
module (``python -m minikv.classroom.explorers.cliff_explorer`` writes it again); the point that the controls choose is
simulated anew whenever one of them moves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from minikv.lab.cliff import CliffRow
from minikv.lab.simulate import Scenario
from minikv.lab.workload import Workload
from minikv.show.plots import DARK, LIGHT, MIDDLE, new_figure
from minikv.show.widgets import Picture, Slider

SESSION_TOKENS, TURNS, OUTPUT_TOKENS, BLOCK_SIZE = 16_000, 8, 20, 250
SESSIONS = range(1, 25)
POOLS = (4, 6, 8)  # memory, in whole sessions that share nothing
THINK_TIMES_S = (0, 10, 60)
SHARES = (0, 25, 50, 75)  # percent of a whole session

CONTROLS = {
    "sessions": Slider("Sessions", SESSIONS, 11),
    "pool": Slider("Memory for so many that share nothing", POOLS, 6),
    "share": Slider("Shared part of a session (%)", SHARES, 50),
    "think_time_s": Slider("Think time (s)", THINK_TIMES_S, 0),
}


def scenario(pool: int, share: int, think_time_s: float = 0) -> Scenario:
    """Memory for ``pool`` sessions of SESSION_TOKENS, of which ``share`` percent are the shared system prompt."""
    system_tokens = SESSION_TOKENS * share // 100
    turn_tokens = (SESSION_TOKENS - system_tokens) // TURNS - OUTPUT_TOKENS
    base = Scenario(workload=Workload(system_tokens, TURNS, turn_tokens, OUTPUT_TOKENS, think_time_s), block_size=BLOCK_SIZE)
    return replace(base, kv_bytes=pool * SESSION_TOKENS * base.shape.kv_bytes_per_token(base.kv_dtype))


def numbers(row: CliffRow) -> list[float]:
    """What a curve keeps of a row: p50, p99 (seconds) and hit rate, to four digits behind the point."""
    return [round(value, 4) for value in (row.p50_ttft_s, row.p99_ttft_s, row.hit_rate)]


def name(pool: int, share: int, think_time_s: float) -> str:
    return f"pool {pool}, share {share}, think {think_time_s:g}"


def curves() -> dict[str, list[list[float]]]:
    """Simulate every curve: by name, ``numbers`` for each of SESSIONS. Takes some minutes."""
    return {
        name(pool, share, think): [numbers(scenario(pool, share, think).run(sessions)) for sessions in SESSIONS]
        for pool in POOLS
        for share in SHARES
        for think in THINK_TIMES_S
    }


@cache
def stored() -> dict[str, list[list[float]]]:
    """The curves that were simulated when this was built."""
    content: dict[str, list[list[float]]] = json.loads(files(__package__).joinpath("cliff_explorer.json").read_text(encoding="utf-8"))
    return content


def draw(sessions: int, pool: int, share: int, think_time_s: float) -> Picture:
    """p50 and p99 time to first token and the hit rate against the number of sessions, with the chosen point simulated now.

    ValueError when a value is none of those of its control.
    """
    for given, known, what in (
        (sessions, SESSIONS, "sessions"),
        (pool, POOLS, "memory"),
        (share, SHARES, "shared part"),
        (think_time_s, THINK_TIMES_S, "think time"),
    ):
        if given not in known:
            raise ValueError(f"there is no curve for {what} = {given}; choose one of {', '.join(map(str, known))}")
    chosen = scenario(pool, share, think_time_s)
    row = chosen.run(sessions)
    figure = _figure(stored()[name(pool, share, think_time_s)], row, chosen.fits)
    return Picture(figure, _summary(row, chosen, pool, share))


def _figure(curve: list[list[float]], row: CliffRow, fits: int) -> Any:
    figure, (top, bottom) = new_figure(rows=2, height=2.5)
    everyone = list(SESSIONS)
    top.plot(everyone, [p99 for _, p99, _ in curve], color=DARK, marker="o", markersize=3.5)
    top.plot(everyone, [p50 for p50, _, _ in curve], color=MIDDLE, marker="s", markersize=3.5, linestyle="--")
    top.set_yscale("log")
    top.set_ylim(0.05, 200)
    top.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    top.set_ylabel("time to first token (s)")
    for label, place in (("p99", 1), ("p50", 0)):
        top.annotate(label, (everyone[-1], curve[-1][place]), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    bottom.plot(everyone, [100 * hit for _, _, hit in curve], color=DARK, marker="o", markersize=3.5)
    bottom.set_ylim(0, 100)
    bottom.set_ylabel("prompt tokens cached (%)")
    bottom.set_xlabel("sessions")
    for axis, values in ((top, (row.p99_ttft_s, row.p50_ttft_s)), (bottom, (100 * row.hit_rate,))):
        axis.axvline(row.sessions, color=LIGHT, linewidth=5, zorder=0)
        axis.plot([row.sessions] * len(values), values, color=DARK, marker="X", markersize=11, linestyle="none", markeredgecolor="white")
        axis.set_xlim(0.5, everyone[-1] + 1.5)
        axis.set_xticks(everyone, [str(each) if each % 2 == 0 else "" for each in everyone])
        if fits < everyone[-1]:
            axis.axvline(fits + 0.5, color=DARK, linestyle=(0, (6, 4)), linewidth=1)
    where = f"dashes: {fits} sessions fit" if fits < everyone[-1] else f"{fits} sessions fit: the cliff is outside the picture"
    top.set_title(f"{where}; cross: simulated now", loc="left", fontsize=10)
    return figure


def _summary(row: CliffRow, chosen: Scenario, pool: int, share: int) -> str:
    workload = chosen.workload
    fits = "all fit" if row.sessions <= chosen.fits else f"{row.sessions - chosen.fits} more than fit"
    return (
        f"Memory for {pool * SESSION_TOKENS:,} tokens holds {workload.system_tokens:,} shared ones and the {workload.own_tokens:,} of each "
        f"of {chosen.fits} sessions ({share} % shared); of {row.sessions} sessions {fits}. "
        f"Time to first token with {workload.think_time_s:g} s of think time: p50 {row.p50_ttft_s:.2f} s, p99 {row.p99_ttft_s:.2f} s. "
        f"Hit rate {row.hit_rate:.1%} of {row.best_hit_rate:.1%} that are possible."
    )


if __name__ == "__main__":
    from pathlib import Path

    lines = [f"{json.dumps(key)}: {json.dumps(values)}" for key, values in curves().items()]
    Path(__file__).with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
