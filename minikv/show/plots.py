"""Figures. They draw data that others hand in and know nothing of engines; every one reads well in grey."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def step_profile(steps: Mapping[str, Mapping[str, float]], title: str, least_share: float = 0.005) -> Any:
    """Where the time of a step goes: a bar for each of ``steps``, stacked from its parts, as shares of the whole.

    ``steps`` maps a step's name to the seconds of its parts, in the words of ``lab.anatomy.PARTS`` or any others; all
    steps have the same parts. The whole time stands behind each bar, and a share in each part that has room for it.
    Parts below ``least_share`` in every step are drawn with the last part. Returns the figure.
    """
    shares = {step: _large_shares(seconds, steps.values(), least_share) for step, seconds in steps.items()}
    figure, (axis,) = new_figure(height=1.5 + 0.45 * len(steps))
    looks = [
        (DARK, ""),
        (LIGHT, "///"),
        (MIDDLE, ""),
        ("white", "..."),
        ("#a8a8a8", ""),
        ("white", "\\\\\\"),
        ("#4d4d4d", "xx"),
        ("white", ""),
        ("#8a8a8a", "|||"),
        ("white", "--"),
    ]
    places = range(len(steps))[::-1]  # the first on top
    left = dict.fromkeys(steps, 0.0)
    for number, part in enumerate(next(iter(shares.values()))):
        color, hatch = looks[number % len(looks)]
        widths = [100 * found[part] for found in shares.values()]
        bars = axis.barh(
            places, widths, left=list(left.values()), height=0.62, color=color, hatch=hatch, edgecolor=DARK, linewidth=0.6, label=part
        )
        ink = "white" if color in (DARK, MIDDLE, "#4d4d4d") else DARK
        box = {"facecolor": "#4d4d4d" if color == "#4d4d4d" else "white", "edgecolor": "none", "pad": 1.0} if hatch else None
        axis.bar_label(
            bars, [f"{width:.0f} %" if width >= 6 else "" for width in widths], label_type="center", color=ink, fontsize=8, bbox=box
        )  # fmt: skip
        left = {step: before + width for (step, before), width in zip(left.items(), widths, strict=True)}
    for place, seconds in zip(places, steps.values(), strict=True):
        axis.annotate(f"{1000 * sum(seconds.values()):.3g} ms", (100, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_yticks(places, list(steps))
    axis.set_xlim(0, 100)
    axis.set_xlabel("share of the step (%)")
    axis.grid(visible=False)
    axis.set_title(title, loc="left", fontsize=10)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _large_shares(seconds: Mapping[str, float], steps: Iterable[Mapping[str, float]], least: float) -> dict[str, float]:
    """Each part's share of ``seconds``; parts that are small in all ``steps`` are added to the last part."""
    whole, last = sum(seconds.values()), list(seconds)[-1]
    largest = {part: max(each[part] / sum(each.values()) for each in steps) for part in seconds}
    kept = {part: taken / whole for part, taken in seconds.items() if largest[part] >= least and part != last}
    return kept | {last: 1 - sum(kept.values())}


def scaling(found: Mapping[str, Any], title: str) -> Any:
    """Six panels from what ``lab.scaling.measure`` found: what grows with what, and what does not. Returns the figure.

    A decode step against batch, context and pool (dashed: the least that the machine could take), bookkeeping against
    cached blocks, start-up, and memory against the arithmetic.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    panels = list(figure.subplots(2, 3).flat)
    for axis in panels:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color=LIGHT, linewidth=0.6)
        axis.set_axisbelow(True)
    _steps_panel(panels[0], [found["batch"]], "sequences", "sequences in the batch")
    by_batch: dict[int, list[Any]] = {}
    for row in found["context"]:
        by_batch.setdefault(row["sequences"], []).append(row)
    _steps_panel(panels[1], list(by_batch.values()), "context", "tokens of context")
    _steps_panel(panels[2], [found["pool"]], "pool_blocks", "blocks in the pool")
    for axis in panels[1:3]:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _bookkeeping_panel(panels[3], found["bookkeeping"])
    _start_up_panel(panels[4], found["start_up_s"])
    _memory_panel(panels[5], found["memory"])
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _steps_panel(axis: Any, lines: Sequence[Sequence[Mapping[str, Any]]], key: str, label: str) -> None:
    for rows, color, marker in zip(lines, (DARK, MIDDLE), ("o", "s"), strict=False):
        name = f"batch of {rows[0]['sequences']}" if len(lines) > 1 else "measured"
        places = [row[key] for row in rows]
        axis.plot(places, [1000 * row["step_s"] for row in rows], color=color, marker=marker, markersize=4, label=name)
        limit = "limit" if rows is lines[0] else None
        axis.plot(places, [1000 * row["limit_s"] for row in rows], color=color, linestyle="--", linewidth=0.9, label=limit)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(label)
    axis.set_ylabel("ms a decode step")
    axis.legend(frameon=False, fontsize=8)


def _bookkeeping_panel(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    places = [row["cached_blocks"] for row in rows]
    axis.plot(places, [row["decode_us_per_token"] for row in rows], color=DARK, marker="o", markersize=4, label="a decoded token")
    looked_up = [row["lookup_us_per_prompt_token"] for row in rows]
    axis.plot(places, looked_up, color=MIDDLE, marker="s", markersize=4, linestyle="--", label="a looked-up token")
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("cached blocks")
    axis.set_ylabel("us of bookkeeping")
    axis.legend(frameon=False, fontsize=8)


def _start_up_panel(axis: Any, found: Mapping[str, Mapping[str, float]]) -> None:
    names = {"warm": "kernels kept", "empty": "kernels compiled"}
    for token, color, shift in (("first", DARK, -0.2), ("second", LIGHT, 0.2)):
        seconds = [each[f"{token}_token_s"] for each in found.values()]
        bars = axis.bar([place + shift for place in range(len(found))], seconds, 0.38, color=color, edgecolor=DARK, label=f"{token} token")
        axis.bar_label(bars, [f"{value:.1f}" for value in seconds], fontsize=8)
    axis.set_xticks(range(len(found)), [names.get(name, name) for name in found])
    axis.set_ylabel("s from a fresh process")
    axis.legend(frameon=False, fontsize=8)


def _memory_panel(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    computed = [row["computed_bytes"] / 1e6 for row in rows]
    measured = [(row["rss_bytes"] or row["tensor_bytes"]) / 1e6 for row in rows]
    axis.plot([0, max(computed)], [0, max(computed)], color=MIDDLE, linestyle="--", linewidth=0.9, label="the same")
    axis.plot(computed, measured, color=DARK, marker="o", markersize=5, linestyle="none", label="weights; pools")
    axis.set_xlabel("MB by arithmetic")
    axis.set_ylabel("MB that the process grew")
    axis.legend(frameon=False, fontsize=8)


def save(figure: Any, path: str | Path) -> None:
    """Write ``figure`` as the kind of file that ``path`` ends in (.png, .svg, .pdf). ValueError for another ending."""
    figure.savefig(path, dpi=150)
