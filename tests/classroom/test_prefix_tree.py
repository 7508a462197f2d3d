"""The picture of chapter 6 says what pool and cache say, whatever is typed."""

from __future__ import annotations

import re
from itertools import product

import matplotlib.pyplot
import matplotlib.style
import pytest

from minikv.cache.blocks import blocks_for
from minikv.classroom.explorers import prefix_tree
from minikv.show.widgets import Explorer, png

START = {name: control.start for name, control in prefix_tree.CONTROLS.items()}


def ids(text: str) -> list[int]:
    return prefix_tree.tokenizer().encode(text)


def common(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("size", prefix_tree.BLOCK_SIZES)
@pytest.mark.parametrize(
    "second", [START["second"], START["first"], prefix_tree.GIVEN[0], "You", "Nobody was here before", "you are a guide."]
)
def test_the_summary_counts_what_arithmetic_counts(size, second):
    """In a pool that forgets nothing, what is found are the full blocks of the longest beginning in common."""
    summary = prefix_tree.draw(**START | {"second": second, "block_size": size, "pool_slots": 96}).summary
    mine = ids(second)
    best = max(common(mine, ids(other)) // size * size for other in (START["first"], *prefix_tree.GIVEN))
    tokens = min(best, (len(mine) - 1) // size * size)
    assert f"{tokens} of {len(mine)} token" in summary
    blocks, new = tokens // size, blocks_for(len(mine), size) - tokens // size
    assert re.search(rf"found in {blocks} blocks?; .* into {new} new blocks?, for which 0 cached blocks were evicted\.", summary)
    assert ("The last token of a prompt is always computed" in summary) == (best > tokens)


def test_owners_and_the_order_of_eviction_are_the_pools():
    tree = prefix_tree.Tree(**START | {"pool_slots": 48})
    shared = [node for node in tree.nodes.values() if node.found]
    assert len(shared) == 4
    assert all(tree.pool.references[node.block] == 2 for node in shared)
    free = {node.block for node in tree.nodes.values() if not tree.pool.references[node.block]}
    assert free == set(tree.order.oldest_first())
    alone = prefix_tree.Tree(**START | {"pool_slots": 48, "first_is": "has ended"})
    assert all(alone.pool.references[node.block] == 1 for node in alone.nodes.values() if node.found)


def test_a_small_pool_evicts_the_oldest_and_keeps_what_is_owned():
    summary = prefix_tree.draw(**START).summary
    assert "for which 1 cached block was evicted" in summary
    tree = prefix_tree.Tree(**START)
    texts = {prefix_tree.tokenizer().decode(node.ids).strip() for node in tree.nodes.values()}
    assert "capital of France" not in texts
    assert "river of Rome" in texts


def test_who_finds_no_room_waits_and_nothing_moves():
    words = START | {"second": "What is the time in Rome, and what is it in Paris?"}
    assert len(ids(words["second"])) <= prefix_tree.MOST_TOKENS
    tree = prefix_tree.Tree(**words)
    assert tree.second.waits
    assert not len(tree.second.table)
    assert prefix_tree.draw(**words).summary.startswith("The second prompt has to wait. 0 of its")
    assert not prefix_tree.Tree(**words | {"first_is": "has ended"}).second.waits


def test_the_tree_holds_every_block_that_can_be_found_and_every_private_one():
    for size, first_is, slots in product(prefix_tree.BLOCK_SIZES, prefix_tree.CONTROLS["first_is"].options, prefix_tree.POOL_SLOTS):
        tree = prefix_tree.Tree(**START | {"block_size": size, "first_is": first_is, "pool_slots": slots})
        owned = {block for one in tree.running for block in one.table.blocks}
        kept = {block for block, kept in enumerate(tree.pool.kept) if kept}
        assert set(tree.nodes) == owned | kept
        assert {node.block for node in tree.nodes.values() if node.private} == owned - kept
        assert all(child.place == node.place + 1 for node in tree.nodes.values() for child in node.children)
        rows = [(node.row, node.place) for node in tree.nodes.values()]
        assert len(set(rows)) == len(rows), "two boxes lie on each other"


@pytest.mark.parametrize("texts", [{}, {"second": START["first"]}, {"first": "x", "second": "y"}, {"second": "a $b$ c_d\n{e} 東"}])
def test_the_corners_of_every_control_are_drawn(texts):
    for size, first_is, slots in product((1, 8), prefix_tree.CONTROLS["first_is"].options, (24, 96)):
        picture = prefix_tree.draw(**START | texts | {"block_size": size, "first_is": first_is, "pool_slots": slots})
        assert len(png(picture.figure)) > 3_000
        assert picture.summary
    assert matplotlib.pyplot.get_fignums() == []


def test_the_style_of_the_chapters_does_not_disturb_it(recwarn):
    with matplotlib.style.context("minikv.show.course"):
        png(prefix_tree.draw(**START).figure)
    assert not recwarn.list


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_prompt_that_cannot_be_drawn_is_refused_with_help(name):
    with pytest.raises(ValueError, match=f"the {name} prompt is empty: type a few words"):
        prefix_tree.draw(**START | {name: ""})
    with pytest.raises(ValueError, match=f"the {name} prompt has 30 tokens and the picture has room for 24: type a shorter one"):
        prefix_tree.draw(**START | {name: "?" * 30})


def test_the_controls_start_where_they_can():
    explorer = Explorer(prefix_tree.draw, prefix_tree.CONTROLS)
    explorer.fields["second"].value = ""
    assert "do not go together" in explorer.view.value
    explorer.fields["second"].value = "you are a guide."
    assert f"0 of {len(ids('you are a guide.'))} tokens found" in explorer.view.value
