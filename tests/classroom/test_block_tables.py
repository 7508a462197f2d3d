"""The picture of chapter 5 says what the pool and the tables say, whatever the controls."""

from __future__ import annotations

import re
from itertools import product

import matplotlib.pyplot
import pytest

from minikv.cache.blocks import blocks_for
from minikv.classroom.explorers import block_tables
from minikv.show.widgets import Explorer, png

EVENTS = block_tables.CONTROLS["events"].values


def tokens_after(events: int, block_size: int) -> dict[str, int]:
    """The history by arithmetic alone: who has how many tokens. Who finds too few blocks changes nothing."""
    tokens: dict[str, int] = {}
    for name, wanted in block_tables.HISTORY[:events]:
        if not wanted:
            tokens.pop(name, None)
            continue
        if sum(blocks_for(count, block_size) for count in (tokens | {name: wanted}).values()) <= block_tables.SLOTS // block_size:
            tokens[name] = wanted
    return tokens


@pytest.mark.parametrize("block_size", block_tables.BLOCK_SIZES)
def test_the_summary_counts_what_arithmetic_counts(block_size):
    for events in EVENTS:
        tokens = tokens_after(events, block_size)
        owned = sum(blocks_for(count, block_size) for count in tokens.values())
        total = block_tables.SLOTS // block_size
        summary = block_tables.draw(events, block_size, "A 0").summary
        found = re.search(
            r"Now (\d+) tokens lie in (\d+) of (\d+) blocks; (\d+) owned slots? (?:is|are) empty, (\d+) blocks? free", summary
        )
        assert found, summary
        empty = owned * block_size - sum(tokens.values())
        assert tuple(map(int, found.groups())) == (sum(tokens.values()), owned, total, empty, total - owned)
        assert empty <= len(tokens) * (block_size - 1)


def test_the_corners_of_every_control_are_drawn():
    for events, size, token in product((EVENTS[0], EVENTS[-1]), (1, 12), ("A 0", "e 9999", "B3")):
        picture = block_tables.draw(events, size, token)
        assert len(png(picture.figure)) > 3_000
        assert picture.summary
    assert matplotlib.pyplot.get_fignums() == []


def test_a_token_is_looked_up_through_the_table():
    park = block_tables.Park(8, 4)
    block, slot = park.tables["D"].locate(9)
    summary = block_tables.draw(8, 4, "D 9").summary
    assert f"9 // 4 = 2, 9 % 4 = 1; entry 2 of D's table is {block}, so it lies in block {block}, slot {slot}." in summary
    assert slot == 1


@pytest.mark.parametrize(
    ("events", "token", "words"),
    [(8, "B 0", "B has left"), (0, "A 0", "A is not there yet"), (8, "D 14", "D has 14 tokens so far, positions 0 to 13")],
)
def test_a_token_that_is_not_there_is_said_so(events, token, words):
    assert words in block_tables.draw(events, 4, token).summary


@pytest.mark.parametrize("token", ["", "D", "9", "F 1", "D -1", "D 1.5", "D 9 9", "ä 1", "D 99999"])
def test_other_words_are_refused_with_an_example(token):
    with pytest.raises(ValueError, match="such as D 9"):
        block_tables.draw(8, 4, token)


def test_the_history_has_a_sequence_in_pieces_and_one_that_must_wait():
    table = block_tables.Park(8, 4).tables["D"]
    assert sorted(table.blocks) != list(table.blocks) or max(table.blocks) - min(table.blocks) >= len(table)
    assert any("must wait" in block_tables.draw(events, size, "A 0").summary for events in EVENTS for size in block_tables.BLOCK_SIZES)


def test_every_block_size_fills_the_rows():
    assert all(block_tables.ROW_SLOTS % size == 0 for size in block_tables.BLOCK_SIZES)
    assert block_tables.SLOTS % block_tables.ROW_SLOTS == 0
    assert max(tokens for _, tokens in block_tables.HISTORY) + max(block_tables.BLOCK_SIZES) - 1 <= block_tables.ROW_SLOTS + 5


def test_the_controls_start_where_they_can():
    explorer = Explorer(block_tables.draw, block_tables.CONTROLS)
    explorer.fields["token"].value = "nonsense"
    assert "do not go together" in explorer.view.value
    explorer.fields["block_size"].value = 1
    explorer.fields["token"].value = "A 3"
    assert "3 // 1 = 3" in explorer.view.value
