"""FLOPs and bytes of a step against counting them one by one."""

from __future__ import annotations

import itertools

import pytest

from minikv.shape.model_shape import ModelShape
from minikv.shape.roofline import StepCost, attention_flops, step_cost, weight_bytes

SHAPES = (
    ModelShape(layers=1, hidden=4, heads=1, kv_heads=1, head_dim=2, vocab=5, ffn=3),
    ModelShape(layers=2, hidden=6, heads=4, kv_heads=2, head_dim=4, vocab=7, ffn=5, qk_norm=True),
    ModelShape(layers=3, hidden=8, heads=6, kv_heads=1, head_dim=2, vocab=9, ffn=4, qkv_bias=True, tied=False),
)
STEPS = ([(1, 1)], [(3, 3)], [(1, 9)], [(2, 7), (1, 4), (5, 5)], [(4, 6), (1, 1)])


def matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """(outputs, inputs) of every matrix that a token of one layer is multiplied with, one by one."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        (queries, shape.hidden), (keys, shape.hidden), (keys, shape.hidden), (shape.hidden, queries),
        (shape.ffn, shape.hidden), (shape.ffn, shape.hidden), (shape.hidden, shape.ffn),
    ]  # fmt: skip


def counted_flops(shape: ModelShape, pieces: list[tuple[int, int]], rows: int) -> int:
    flops = 0
    for new, context in pieces:
        for position in range(context - new, context):
            for _ in range(shape.layers):
                flops += sum(2 * outputs * inputs for outputs, inputs in matrices(shape))
                for _head, _seen in itertools.product(range(shape.heads), range(position + 1)):
                    flops += 2 * shape.head_dim  # the score
                    flops += 2 * shape.head_dim  # the value, weighted and added
    return flops + rows * 2 * shape.vocab * shape.hidden


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pieces", STEPS)
def test_flops_are_those_that_one_counts(shape: ModelShape, pieces: list[tuple[int, int]]) -> None:
    for rows in (0, len(pieces)):
        assert step_cost(shape, pieces, rows).flops == counted_flops(shape, pieces, rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_with_logits_reads_the_weights_and_its_context(shape: ModelShape) -> None:
    one = step_cost(shape, [(1, 9)], rows=1)
    embedding_row = 0 if shape.tied else shape.hidden * 4
    unread = 0 if shape.tied else shape.vocab * shape.hidden * 4  # of an embedding that is not the head, one row is read
    assert one.weight_bytes == shape.parameters * 4 - unread + embedding_row
    assert one.kv_bytes == 9 * shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    assert step_cost(shape, [(1, 9)], rows=1, dtype="bf16").bytes * 2 == one.bytes


def test_without_logits_the_head_is_not_read() -> None:
    shape = SHAPES[1]
    saved = weight_bytes(shape, 3, 1) - weight_bytes(shape, 3, 0)
    assert saved == 4 * (shape.vocab * shape.hidden + shape.hidden - 3 * shape.hidden)


def test_chunks_of_a_prompt_compute_the_same_and_move_more() -> None:
    shape = SHAPES[1]
    whole = step_cost(shape, [(8, 8)], rows=1)
    chunks = step_cost(shape, [(3, 3)], rows=0) + step_cost(shape, [(5, 8)], rows=1)
    assert whole.flops == chunks.flops
    assert whole.bytes < chunks.bytes
    assert attention_flops(shape, 8, 8) == attention_flops(shape, 3, 3) + attention_flops(shape, 5, 8)


def test_the_roof_is_the_longer_of_the_two() -> None:
    cost = StepCost(weight_bytes=60, kv_bytes=40, matrix_flops=300, attention_flops=100)
    assert cost.seconds(bytes_per_s=10, flops_per_s=100) == 10.0  # bound by memory
    assert cost.seconds(bytes_per_s=100, flops_per_s=100) == 4.0  # bound by compute


@pytest.mark.parametrize("piece", [(0, 3), (4, 3), (-1, 2)])
def test_an_impossible_piece_is_refused(piece: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=str(piece[1])):
        step_cost(SHAPES[0], [piece], rows=1)
