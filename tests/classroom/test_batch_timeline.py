"""The timeline of chapter 7 shows what the engine did, and its summary counts what arithmetic counts."""

from __future__ import annotations

import re
from itertools import product

import matplotlib.pyplot
import pytest

from minikv.cache.blocks import blocks_for
from minikv.classroom.explorers import batch_timeline
from minikv.classroom.explorers.batch_timeline import BLOCK_SIZE, BUDGETS, LONG, LONG_NEW, POOLS, PROMPTS, READERS, draw, run
from minikv.show.widgets import Explorer, png

WANTED = {name: (tokens, new) for _, name, tokens, new in READERS}


@pytest.mark.parametrize("chunking", [True, False])
@pytest.mark.parametrize("pool", POOLS)
def test_every_request_gets_its_tokens_and_computes_what_it_must(pool, chunking):
    for budget, prompt in product(BUDGETS, PROMPTS):
        done = run(budget, chunking, pool, prompt)
        wanted = WANTED | ({} if done.refused else {LONG: (prompt, LONG_NEW)})
        assert (done.refused is None) == (blocks_for(prompt + LONG_NEW - 1, BLOCK_SIZE) <= pool)
        assert {name: len(steps) for name, steps in done.token_steps.items()} == {name: new for name, (_, new) in wanted.items()}
        least = sum(tokens + new - 1 for tokens, new in wanted.values())
        assert sum(done.step_tokens) >= least
        assert (sum(done.step_tokens) == least) == (done.preemptions == 0)
        assert sum(map(len, done.preempted)) == done.preemptions
        if chunking:
            assert max(done.step_tokens) <= budget


def test_chunks_shorten_the_readers_longest_gap_and_lengthen_the_way_to_the_first_token():
    whole, cut = run(12, False, 48, 48), run(12, True, 48, 48)
    assert whole.longest_gap() == (48 + 4, "d", 3, 4)
    assert cut.longest_gap()[0] == 12
    assert whole.token_steps[LONG][0] == 4
    assert cut.token_steps[LONG][0] == 4 + 48 // (12 - 4) - 1


def test_the_summary_says_what_happened():
    assert draw(12, "on", 48, 48).summary == (
        "17 steps, at most 12 tokens a step, 48 blocks; the largest step has 12 tokens; 0 preemptions. "
        "The long prompt of 48 tokens was computed in 6 pieces; its first token came in step 9, 72 computed tokens after it arrived. "
        "Longest gap between two tokens of a reader: 12 computed tokens (d, from step 8 to 9)."
    )
    assert "no limit to a step (chunking off)" in draw(12, "off", 48, 48).summary
    assert "in 1 piece; its first token came in step 4, 52 computed tokens" in draw(12, "off", 48, 48).summary
    assert "1 preemption." in draw(12, "on", 16, 32).summary
    assert "The long request was refused when it came: 48 prompt tokens and 4 new ones need 13 blocks" in draw(12, "on", 12, 48).summary


def test_a_prompt_that_is_preempted_half_way_is_said_to_be_computed_twice():
    done = run(8, True, 24, 48)
    assert LONG in set().union(*done.preempted)
    again = re.search(r"in (\d+) pieces \((\d+) tokens of them twice, after a preemption\)", draw(8, "on", 24, 48).summary)
    assert again
    assert int(again[2]) == sum(step[LONG][0] for step in done.steps[: done.token_steps[LONG][0] + 1] if LONG in step) - 48


def test_the_corners_of_every_control_are_drawn():
    for budget, chunking, pool, prompt in product(BUDGETS[:: len(BUDGETS) - 1], ("on", "off"), POOLS[:: len(POOLS) - 1], (8, 64)):
        picture = draw(budget, chunking, pool, prompt)
        assert len(png(picture.figure)) > 3_000
        assert picture.summary
    assert matplotlib.pyplot.get_fignums() == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((12, "perhaps", 48, 48), "on or off, not 'perhaps'"),
        ((0, "on", 48, 48), "a budget of 0"),
        ((12, "on", 48, 0), "a prompt of 0"),
        ((12, "on", 4, 48), "4 blocks cannot hold a reader's 5"),
    ],
)
def test_values_that_make_no_sense_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        draw(*values)


def test_the_controls_move_the_picture():
    explorer = Explorer(batch_timeline.draw, batch_timeline.CONTROLS)
    before = explorer.view.value
    explorer.fields["chunking"].value = "off"
    assert "no limit to a step" in explorer.view.value
    assert explorer.view.value != before
