"""Figures. They draw data that others hand in and know nothing of engines; every one reads well in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DARK, MIDDLE, LIGHT = "#1f1f1f", "#767676", "#c8c8c8"


def new_figure(rows: int = 1, width: float = 7.5, height: float = 3.2) -> tuple[Any, list[Any]]:
    """A figure and its axes, drawn without a screen, in the house's plain style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, 1, squeeze=False)[:, 0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color=LIGHT, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def cliff(
    rows: Sequence[Any],
    fits: int,
    title: str,
    band: Mapping[int, Sequence[Any]] | None = None,
    beside: Sequence[tuple[int, float]] = (),
    beside_label: str = "published p99",
) -> Any:
    """Time to first token (p50, p99 and the spread over sessions) above, hit rate below, against the number of sessions.

    ``rows`` have the attributes of a ``lab.cliff.CliffRow``. The dashed line stands where the arithmetic puts the cliff.
    ``band`` has rows for other capacities (whole sessions that fit), drawn as thin p99 lines with their number;
    ``beside`` are (sessions, p99 in s) of a measurement to compare with, drawn as crosses. Returns the matplotlib figure.
    """
    figure, (top, bottom) = new_figure(rows=2, height=2.9)
    sessions = [row.sessions for row in rows]
    top.fill_between(
        sessions, [row.luckiest_ttft_s for row in rows], [row.unluckiest_ttft_s for row in rows],
        color=LIGHT, label="luckiest to unluckiest session (mean)",
    )  # fmt: skip
    top.plot(sessions, [row.p99_ttft_s for row in rows], color=DARK, marker="o", label="p99")
    top.plot(sessions, [row.p50_ttft_s for row in rows], color=MIDDLE, marker="s", linestyle="--", label="p50")
    for other, found in (band or {}).items():
        top.plot([row.sessions for row in found], [row.p99_ttft_s for row in found], color=MIDDLE, linewidth=0.9, linestyle=":")
        beyond = next((row for row in found if row.sessions > other), found[-1])
        place = (beyond.sessions, beyond.p99_ttft_s)
        top.annotate(f"room for {other}", place, xytext=(0, 6), textcoords="offset points", ha="right", fontsize=8)
    if beside:
        top.plot(*zip(*beside, strict=True), color=DARK, marker="x", markersize=9, linestyle="none", label=beside_label)
    top.set_yscale("log")
    top.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    top.yaxis.set_minor_formatter(lambda value, _: "")
    top.set_ylabel("time to first token (s)")
    top.set_title(title, loc="left", fontsize=10)
    bottom.plot(sessions, [100 * row.hit_rate for row in rows], color=DARK, marker="o", label="hit rate")
    bottom.plot(sessions, [100 * row.best_hit_rate for row in rows], color=MIDDLE, linestyle=":", label="if nothing were forgotten")
    bottom.set_ylim(0, 100)
    bottom.set_ylabel("prompt tokens cached (%)")
    bottom.set_xlabel("concurrent sessions")
    for axis in (top, bottom):
        axis.axvline(fits + 0.5, color=DARK, linestyle=(0, (6, 4)), linewidth=1)
        axis.set_xticks(sessions, _labels_with_room(sessions, keep=(fits + 1,)))
    bottom.annotate(f"{fits} sessions fill the pool", (fits + 0.5, 42), xytext=(6, 0), textcoords="offset points", fontsize=9)
    top.legend(frameon=False, fontsize=9, loc="best")
    bottom.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def _labels_with_room(values: Sequence[int], keep: Sequence[int]) -> list[str]:
    """A label for each of the sorted ``values``, empty where it would run into its neighbour; ``keep`` go first."""
    room = (values[-1] - values[0]) / 40
    chosen: list[int] = []
    for value in sorted(values, key=lambda value: (value not in keep, -value)):
        if all(abs(value - other) >= room for other in chosen):
            chosen.append(value)
    return [str(value) if value in chosen else "" for value in values]


def capacity(curve: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Any:
    """Hit rate against the cache's capacity in tokens, a line for each policy of ``curve``. Returns the figure."""
    figure, (axis,) = new_figure(height=3.6)
    styles = [(DARK, "o", "-"), (MIDDLE, "s", "--"), (DARK, "^", ":")]
    for (policy, line), (color, marker, dashes) in zip(curve.items(), styles, strict=False):
        axis.plot(
            [tokens for tokens, _ in line], [100 * rate for _, rate in line], color=color, marker=marker, markersize=5,
            linestyle=dashes, label=policy,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("capacity of the cache (tokens)")
    axis.set_ylabel("blocks found (%)")
    axis.set_title(title, loc="left", fontsize=10)
    axis.legend(frameon=False, fontsize=9)
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Write ``figure`` as the kind of file that ``path`` ends in (.png, .svg, .pdf). ValueError for another ending."""
    figure.savefig(path, dpi=150)
