"""The cliff stands where the arithmetic puts it: asserted by counters, not clocks."""

from __future__ import annotations

import pytest

import minikv
from minikv.engine.runner import TorchRunner
from minikv.lab.cliff import CliffRow, as_json, measure, measure_row, session_counts
from minikv.lab.workload import Turn, Workload, run_sessions

SHAPE = minikv.ModelShape(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, vocab=64, ffn=16, max_context=512)


@pytest.fixture(scope="module")
def model():
    return minikv.load(shape=SHAPE)


def row(model, workload: Workload, fits: int, sessions: int, block_size: int, budget: int = 64) -> CliffRow:
    return measure_row(lambda blocks, size: TorchRunner(model, blocks, size), workload, fits, sessions, block_size, budget)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("fits", [1, 2, 5])
@pytest.mark.parametrize("turn", [(8, 4), (12, 4), (7, 6)])
def test_the_hit_rate_falls_exactly_behind_the_last_session_that_fits(model, block_size, fits, turn):
    workload = Workload(system_tokens=32, turns=8, turn_tokens=turn[0], output_tokens=turn[1])
    for sessions in range(1, fits + 1):
        fitting = row(model, workload, fits, sessions, block_size)
        assert fitting.hit_rate == fitting.best_hit_rate
        assert (fitting.evictions, fitting.preemptions) == (0, 0)
    over = row(model, workload, fits, fits + 1, block_size)
    assert over.evictions > 0
    assert over.hit_rate < over.best_hit_rate


def test_one_block_less_than_the_arithmetic_says_is_one_too_few(model):
    workload = Workload(system_tokens=32, turns=6, turn_tokens=12, output_tokens=4)

    def blocks_taken_away(missing: int) -> int:
        measured = measure_row(lambda blocks, size: TorchRunner(model, blocks - missing, size), workload, fits=3, sessions=3, block_size=4)
        return measured.evictions + measured.preemptions

    assert blocks_taken_away(missing=0) == 0
    assert blocks_taken_away(missing=1) > 0


def test_computed_tokens_are_what_the_workload_says_while_all_fits(model):
    workload, sessions, size = Workload(system_tokens=32, turns=5, turn_tokens=10, output_tokens=3), 3, 4
    measured = row(model, workload, fits=3, sessions=sessions, block_size=size)
    first = workload.prompt_tokens(0) + workload.output_tokens - 1
    later = sum(
        workload.prompt_tokens(turn) - workload.cacheable_tokens(turn, size) + workload.output_tokens - 1
        for turn in range(1, workload.turns)
    )
    # All first turns start in the same steps, before anyone has written the system prompt; the budget of 64 lets the
    # first prompt (42 tokens) finish before the others begin theirs, or not: then they hit its 8 full blocks or none.
    cold = measured.computed_tokens - sessions * later
    assert cold in {sessions * first - shared * workload.system_tokens for shared in range(sessions)}


def test_think_time_lets_sessions_take_turns(model):
    workload = Workload(system_tokens=16, turns=3, turn_tokens=4, output_tokens=2, think_time_s=0.02)
    engine = minikv.Engine(model, num_blocks=workload.blocks(2, 4), block_size=4)
    turns = run_sessions(engine, workload, 2)
    assert len(turns) == 6
    for before, after in zip(
        [turn for turn in turns if turn.session == 0], [turn for turn in turns if turn.session == 0][1:], strict=False
    ):
        assert after.arrived_at == pytest.approx(before.finished_at + workload.think_time_s)


def test_every_turn_is_told_once_and_prompts_grow(model):
    workload, told = Workload(system_tokens=16, turns=4, turn_tokens=4, output_tokens=2), []
    engine = minikv.Engine(model, num_blocks=workload.blocks(3, 4), block_size=4)
    turns = run_sessions(engine, workload, 3, told.append)
    assert told == turns
    assert sorted((turn.session, turn.turn) for turn in turns) == [(s, t) for s in range(3) for t in range(4)]
    assert all(turn.prompt_tokens == workload.prompt_tokens(turn.turn) for turn in turns)
    assert all(turn.output_tokens == 2 for turn in turns)


def test_the_workload_is_the_same_every_time(model):
    workload = Workload(system_tokens=16, turns=4, turn_tokens=8, output_tokens=4)

    def counters() -> list[tuple[int, ...]]:
        engine = minikv.Engine(model, num_blocks=workload.blocks(2, 4), block_size=4)
        turns: list[Turn] = run_sessions(engine, workload, 4)
        return [(turn.session, turn.turn, turn.cached_tokens, turn.computed_tokens) for turn in turns]

    assert counters() == counters()


def test_around_the_cliff_is_always_measured():
    assert {3, 7, 8, 9, 10} <= set(session_counts(8))
    assert {3, 7, 8, 9, 10} == set(session_counts(8, quick=True))
    assert min(session_counts(1)) == 1


def test_json_has_the_fixed_words(model):
    workload = Workload(system_tokens=16, turns=2, turn_tokens=4, output_tokens=2)
    content = as_json(measure(model, workload, 2, [1, 3], block_size=4), 2, 1.5, workload)
    assert content["fits_sessions"] == 2
    assert content["seconds"] == 1.5
    assert [entry["sessions"] for entry in content["rows"]] == [1, 3]
    words = {"sessions", "p50_ttft_s", "p99_ttft_s", "hit_rate", "tokens_per_s", "cold_p99_ttft_s"}
    assert all(words <= set(entry) for entry in content["rows"])
    assert {entry["sessions"]: entry["p99_ttft_s"] for entry in content["published"]} == {12: 2.6, 14: 38.9}


@pytest.mark.parametrize(
    "wrong",
    [{"turns": 0}, {"turn_tokens": 0}, {"output_tokens": 0}, {"system_tokens": -1}, {"think_time_s": -1.0}, {"think_time_s": float("nan")}],
)
def test_a_senseless_workload_is_refused(wrong):
    with pytest.raises(minikv.RequestError, match=next(iter(wrong))):
        Workload(**wrong)


def test_a_pool_below_one_session_and_a_session_beyond_the_context_are_refused(model):
    with pytest.raises(minikv.RequestError, match="at least one session"):
        row(model, Workload(), fits=0, sessions=1, block_size=4)
    with pytest.raises(minikv.RequestError, match="context of 512"):
        measure(model, Workload(), 2, [1])
