"""The explorer of chapter 2: its numbers against arithmetic, at every value that its controls offer."""

from __future__ import annotations

import itertools
import re

import matplotlib.pyplot as plt
import pytest
import torch

from minikv.classroom.explorers import growing_cache
from minikv.show.widgets import Choice, Slider, png

BEFORE, NEW, CACHE = (growing_cache.CONTROLS[name] for name in ("before", "new", "cache"))
assert isinstance(BEFORE, Slider)
assert isinstance(NEW, Slider)
assert isinstance(CACHE, Choice)


@pytest.mark.parametrize(("before", "new"), list(itertools.product(BEFORE.values, NEW.values)))
def test_the_counts_of_a_step(before: int, new: int) -> None:
    total = before + new
    cached, plain = growing_cache.step(before, new, True), growing_cache.step(before, new, False)
    assert (cached.kept, cached.computed, cached.scores, cached.masked) == (before, new, new * total, new * (new - 1) // 2)
    assert (plain.kept, plain.computed, plain.scores, plain.masked) == (0, total, total * total, total * (total - 1) // 2)
    for done in (cached, plain):
        torch.testing.assert_close(done.weights.sum(-1), torch.ones(done.queries))
    torch.testing.assert_close(cached.weights, plain.weights[before:])  # the same attention, whoever kept K and V
    seen = torch.ones(total, total).tril()[before:] > 0
    assert torch.equal(cached.weights > 0, seen)


@pytest.mark.parametrize(
    ("before", "new", "cache"),
    list(itertools.product((BEFORE.values[0], BEFORE.start, BEFORE.values[-1]), (NEW.values[0], NEW.values[-1]), CACHE.options)),
)
def test_the_picture_says_what_the_step_did(before: int, new: int, cache: str) -> None:
    picture = growing_cache.draw(before, new, cache)
    done, other = growing_cache.step(before, new, cache == "on"), growing_cache.step(before, new, cache == "off")
    assert f"cache {cache}." in picture.summary
    assert [int(number) for number in re.findall(r"(\d+) scores?", picture.summary)] == [done.scores, other.scores]
    assert [int(number) for number in re.findall(r"(\d+)(?: rows?)? computed", picture.summary)] == [done.computed, other.computed]
    masked = re.search(r"(\d+|none) of them masked", picture.summary)
    assert masked is not None
    assert masked[1] == (str(done.masked) if done.masked else "none")
    grid = picture.figure.axes[0]
    assert len(grid.texts) == done.scores - done.masked
    assert sum(cell.get_hatch() is not None and cell.get_hatch() != "" for cell in grid.patches) == done.masked
    assert png(picture.figure).startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_the_names_of_the_steps() -> None:
    assert growing_cache.draw(0, 4, "on").summary.startswith("Prefill: 0 tokens before, 4 new")
    assert growing_cache.draw(6, 1, "on").summary.startswith("Decode: 6 tokens before, 1 new")
    assert growing_cache.draw(1, 3, "off").summary.startswith("A further piece of a prompt: 1 token before, 3 new")


@pytest.mark.parametrize(("before", "new", "cache"), [(-1, 1, "on"), (10, 1, "on"), (3, 0, "off"), (3, 5, "on"), (3, 1, "maybe")])
def test_values_that_are_not_offered(before: int, new: int, cache: str) -> None:
    with pytest.raises(ValueError, match="not "):
        growing_cache.draw(before, new, cache)
