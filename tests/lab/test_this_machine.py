"""Steps that are timed: the pieces asked for are the pieces run, and sums that make no sense are refused."""

from __future__ import annotations

from time import perf_counter

import pytest

import minikv
from minikv.engine.runner import TorchRunner
from minikv.lab.this_machine import step_times_s
from minikv.shape.model_shape import ModelShape

SHAPE = ModelShape(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, vocab=32, ffn=16, max_context=128)


def test_a_timed_step_runs_the_pieces_it_was_asked_for(monkeypatch):
    model, seen = minikv.load(shape=SHAPE), []
    execute = TorchRunner.execute

    def watched(runner, plan, now):
        result = execute(runner, plan, now)
        seen.append(([(piece.end - piece.start, piece.end) for piece in plan.pieces], len(result.tokens), runner.num_blocks))
        return result

    monkeypatch.setattr(TorchRunner, "execute", watched)
    times = step_times_s(model, [(1, 20), (7, 7)], block_size=4, at_least=3)
    assert len(times) == 3
    assert min(times) > 0
    assert seen == [([(1, 20), (7, 7)], 2, 5 + 2)] * 3


def test_steps_are_repeated_for_as_long_as_asked():
    model = minikv.load(shape=SHAPE)
    started = perf_counter()
    step_times_s(model, [(1, 4)], seconds=0.2)
    assert perf_counter() - started >= 0.2


def test_pieces_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="a piece of 3 new tokens cannot have a context of 2"):
        step_times_s(minikv.load(shape=SHAPE), [(3, 2)])


def test_blocks_lie_all_over_a_larger_pool(monkeypatch):
    tables = []
    execute = TorchRunner.execute

    def watched(runner, plan, now):
        tables.append([list(piece.table.blocks) for piece in plan.pieces])
        return execute(runner, plan, now)

    monkeypatch.setattr(TorchRunner, "execute", watched)
    step_times_s(minikv.load(shape=SHAPE), [(1, 9), (1, 8)], block_size=4, pool_blocks=100)
    assert tables[0] == [[0, 20, 40], [60, 80]]


def test_a_pool_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="need 5 blocks, the pool has 4"):
        step_times_s(minikv.load(shape=SHAPE), [(1, 9), (1, 8)], block_size=4, pool_blocks=4)
