"""One step of a decoder with and without a KV cache: which scores it computes, and where its rows of K and V come from.

The two stores of chapters 1 and 2 are asked for one step each. The step's values are one-hot rows (token j has a 1 in place
j), so what ``attend`` returns for a query *is* its attention weights: a weight of exactly 0 is a masked score. Nothing about
the mask is written down here a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minikv.cache.contiguous import Contiguous
from minikv.cache.no_cache import NoCache
from minikv.cache.step import Piece
from minikv.shape.model_shape import ModelShape
from minikv.show.plots import DARK, LIGHT, MIDDLE
from minikv.show.widgets import Choice, Picture, Slider

WORDS = "The capital of France is Paris which has the Eiffel Tower with home".split()  # noqa: SIM905
MOST_BEFORE, MOST_NEW = 9, 4
SHAPE = ModelShape(layers=1, hidden=32, heads=1, kv_heads=1, head_dim=32, vocab=len(WORDS), ffn=1)

CONTROLS = {
    "before": Slider("tokens before this step", range(MOST_BEFORE + 1), 6),
    "new": Slider("new tokens in this step", range(1, MOST_NEW + 1), 1),
    "cache": Choice("cache", ["on", "off"], "on"),
}


@dataclass(frozen=True)
class Step:
    """What one step did in one layer and head.

    ``weights`` [queries, tokens] are its attention weights; the queries are the last tokens. ``kept`` rows of K and V were
    in the store before the step, ``computed`` rows were handed to it by the step.
    """

    weights: Tensor
    kept: int
    computed: int

    @property
    def queries(self) -> int:
        return self.weights.shape[0]

    @property
    def tokens(self) -> int:
        return self.weights.shape[1]

    @property
    def scores(self) -> int:
        return self.weights.numel()

    @property
    def masked(self) -> int:
        return int((self.weights == 0).sum())


def step(before: int, new: int, with_cache: bool) -> Step:
    """Ask the engine's ``Contiguous`` (or ``NoCache``) for the step that brings ``new`` tokens after ``before``."""
    total = before + new
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(total, 1, SHAPE.head_dim, generator=generator) for _ in "qk")
    v = torch.eye(SHAPE.head_dim)[:total, None]  # [total, 1, head_dim]: token j has a 1 in place j
    kv: Any = Contiguous(SHAPE, max_tokens=total) if with_cache else NoCache()
    if with_cache and before:
        kv.begin([Piece("text", range(before))])
        kv.attend(0, q[:before], k[:before], v[:before])
    kept = kv.lengths.get("text", 0) if with_cache else 0
    kv.begin([Piece("text", range(kept, total), start=kept)])
    out = kv.attend(0, q[kept:], k[kept:], v[kept:])  # [queries, 1, head_dim]
    return Step(out[:, 0, :total], kept, len(k[kept:]))


def draw(before: int, new: int, cache: str) -> Picture:
    """The grid of scores of one step, and its rows of K and V. ValueError for values that the controls do not offer."""
    if before not in range(MOST_BEFORE + 1) or new not in range(1, MOST_NEW + 1):
        raise ValueError(f"a step has 0 to {MOST_BEFORE} tokens before it and 1 to {MOST_NEW} new ones, not {before!r} and {new!r}")
    if cache not in ("on", "off"):
        raise ValueError(f"the cache is on or off, not {cache!r}")
    done = step(before, new, cache == "on")
    return Picture(_figure(done, before), _summary(done, before, new, cache))


def _name(before: int, new: int) -> str:
    if before == 0:
        return "Prefill"
    return "Decode" if new == 1 else "A further piece of a prompt"


def _summary(done: Step, before: int, new: int, cache: str) -> str:
    cached = cache == "on"
    other = step(before, new, with_cache=not cached)
    masked = f"{done.masked} of them masked" if done.masked else "none of them masked"
    from_where = (
        f"{_count(done.kept, 'row')} read from the cache, {done.computed} computed"
        if cached
        else f"{_count(done.computed, 'row')} computed, {before} of them not for the first time"
    )
    return (
        f"{_name(before, new)}: {_count(before, 'token')} before, {new} new, cache {cache}. "
        f"{_count(done.queries, 'row')} of Q against {_count(done.tokens, 'row')} of K: {_count(done.scores, 'score')}, {masked}. "
        f"K and V: {from_where}. The same step with the cache {'off' if cached else 'on'}: "
        f"{_count(other.computed, 'row')} computed, {_count(other.scores, 'score')}."
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


LOOKS = {
    "c": ("c  row from the cache", LIGHT, "", DARK),
    "n": ("n  row of a new token", DARK, "", "white"),
    "a": ("a  row computed again", MIDDLE, "", "white"),
    "": ("score masked", "white", "////", DARK),
}
"""Letter in a cell -> (meaning, colour, hatch, colour of the letter): where the cell's row of K (or V) comes from."""


def _figure(done: Step, before: int) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    total, first = done.tokens, done.tokens - done.queries
    source = ["c" if token < done.kept else "a" if token < before else "n" for token in range(total)]
    figure = Figure(figsize=(7.5, 1.6 + 0.27 * total), layout="constrained")
    grid, rows = figure.subplots(1, 2, width_ratios=[max(total, 6), 3])
    used = set(source)

    def cell(axis: Any, x: float, y: int, letter: str) -> None:
        used.add(letter)
        _, colour, hatch, ink = LOOKS[letter]
        axis.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, hatch=hatch, edgecolor=MIDDLE if hatch else "white", linewidth=0.8))
        if not hatch:
            written = axis.text(x + 0.5, y + 0.5, letter, ha="center", va="center", fontsize=8, color=ink)
            written.set_in_layout(False)  # it lies inside its cell; a layout that asks each of a hundred texts takes a second

    for query in range(total):
        for token in range(total):
            if query < first:
                grid.add_patch(Rectangle((token, query), 1, 1, facecolor="none", edgecolor=LIGHT, linewidth=0.5))
            else:
                cell(grid, token, query, "" if done.weights[query - first, token] == 0 else source[token])
        cell(rows, 0, query, source[query])
        cell(rows, 1.2, query, source[query])
    for axis in (grid, rows):
        axis.set_ylim(total, 0)
        axis.set_aspect("equal")
        axis.tick_params(length=0, labelsize=8)
        axis.spines[:].set_visible(False)
    places = [token + 0.5 for token in range(total)]
    grid.set_xlim(0, total)
    grid.set_xticks(places, WORDS[:total], rotation=60, ha="right", rotation_mode="anchor")
    grid.set_yticks(places, WORDS[:total])
    grid.set_xlabel("key of ...", fontsize=9)
    grid.set_ylabel("query of ...", fontsize=9)
    grid.set_title(f"{_count(done.scores, 'score')} in this step (empty: not computed)", loc="left", fontsize=10)
    rows.set_xlim(0, 2.2)
    rows.set_xticks([0.5, 1.7], ["K", "V"])
    rows.set_yticks([])
    rows.set_title("rows kept or made", loc="center", fontsize=10)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=colour, hatch=hatch, edgecolor=MIDDLE, label=words)
        for letter, (words, colour, hatch, _) in LOOKS.items()
        if letter in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure
