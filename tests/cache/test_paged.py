"""What ``Paged.begin`` writes down about a step, against a slow recount of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.paged import Paged, StepTensors
from minikv.cache.step import Piece
from minikv.shape.model_shape import ModelShape

SHAPE = ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, vocab=50, ffn=8, max_context=200)
BLOCKS = 60
SIXTY_FOUR_BITS = ("token_ids", "positions", "slots", "logit_rows")
THIRTY_TWO_BITS = ("query_starts", "context_lengths", "block_tables", "chunks")


def some_pieces(dice: random.Random, block_size: int, decode_only: bool) -> list[Piece]:
    free = dice.sample(range(BLOCKS), BLOCKS)
    pieces = []
    for name in range(dice.randint(1, 6)):
        count = 1 if decode_only or dice.random() < 0.5 else dice.randint(1, 9)
        start = dice.randint(0, 12)
        table = BlockTable(block_size)
        for _ in range(blocks_for(start + count, block_size) + dice.randint(0, 2)):  # it may have more than it needs
            if free:
                table.blocks.append(free.pop())
        if len(table) * block_size >= start + count:
            logits = "last" if decode_only else dice.choice(("none", "last", "all"))
            pieces.append(Piece(name, [dice.randrange(50) for _ in range(count)], start, table, logits))
    return pieces or some_pieces(dice, block_size, decode_only)


def recount(pieces: Sequence[Piece], block_size: int, padded: int, width: int, every_row: bool) -> dict[str, list]:
    """The same, token by token. Padding: every token a sequence of its own, one token long, in the scratch block."""
    want: dict[str, list] = {name: [] for name in SIXTY_FOUR_BITS + THIRTY_TWO_BITS}
    want["query_starts"] = [0]
    for number, piece in enumerate(pieces):
        for place, token in enumerate(piece.tokens):
            position = piece.start + place
            if piece.logits == "all" or (piece.logits == "last" and place == len(piece.tokens) - 1):
                want["logit_rows"].append(len(want["token_ids"]))
            want["token_ids"].append(token)
            want["positions"].append(position)
            want["slots"].append(piece.table.blocks[position // block_size] * block_size + position % block_size)
        want["query_starts"].append(len(want["token_ids"]))
        want["context_lengths"].append(piece.end)
        used = blocks_for(piece.end, block_size)
        want["block_tables"].append([*piece.table.blocks[:used], *[BLOCKS] * (width - used)])
        if len(piece.tokens) > 1:
            want["chunks"].append(number)
    while len(want["token_ids"]) < padded:
        if every_row:
            want["logit_rows"].append(len(want["token_ids"]))
        want["token_ids"].append(0)
        want["positions"].append(0)
        want["slots"].append(BLOCKS * block_size)
        want["query_starts"].append(len(want["token_ids"]))
        want["context_lengths"].append(1)
        want["block_tables"].append([BLOCKS] * width)
    return want


def check(step: StepTensors, want: dict[str, list]) -> None:
    for name, numbers in want.items():
        tensor = getattr(step, name)
        assert tensor.tolist() == numbers, name
        assert tensor.dtype == (torch.int64 if name in SIXTY_FOUR_BITS else torch.int32), name
        assert tensor.data_ptr() == step.address(name) or not tensor.numel(), name
    assert step.num_tokens == len(want["token_ids"])
    assert step.num_rows == len(want["logit_rows"])


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("seed", range(15))
def test_a_step_is_written_down_token_by_token(block_size: int, padding: int, seed: int) -> None:
    kv = Paged(SHAPE, BLOCKS, block_size, bucket=lambda tokens: tokens + padding)
    pieces = some_pieces(random.Random(seed), block_size, decode_only=False)
    step = kv.begin(pieces)
    tokens = sum(len(piece.tokens) for piece in pieces)
    width = max(blocks_for(piece.end, block_size) for piece in pieces)
    check(step, recount(pieces, block_size, tokens + padding, width, every_row=False))
    assert step is kv.step
    assert step.max_query_tokens == max(len(piece.tokens) for piece in pieces)
    assert step.max_context_tokens == max(piece.end for piece in pieces)
    starts, ends = step.query_starts.tolist(), step.context_lengths.tolist()
    assert step.pieces == [(first, last - first, end) for first, last, end in zip(starts, starts[1:], ends, strict=False)]


@pytest.mark.parametrize("seed", range(15))
def test_a_step_over_tensors_in_place(seed: int) -> None:
    dice, kv = random.Random(seed), Paged(SHAPE, BLOCKS, 4)
    reserved = kv.reserve(8, 9)
    check(reserved, recount([], 4, 8, 9, every_row=True))
    for _ in range(3):  # what a step leaves behind is no part of the next one
        pieces = some_pieces(dice, 4, decode_only=True)
        assert kv.begin(pieces, into=reserved) is kv.step is reserved
        check(reserved, recount(pieces, 4, 8, 9, every_row=True))


@pytest.mark.parametrize("start", [3, 4])
def test_a_table_one_token_too_short_is_refused(start: int) -> None:
    kv, table = Paged(SHAPE, BLOCKS, 4), BlockTable(4)
    table.blocks.append(7)
    before = kv.begin([Piece("fits", [1], 3, table)])
    with pytest.raises(ValueError, match=rf"'long': {5 - start} tokens up to 5 need 2 blocks, its table has 1"):
        kv.begin([Piece("long", [1] * (5 - start), start, table)])
    assert kv.step is before


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda tokens: array("i", tokens), lambda tokens: array("l", tokens), torch.tensor]
)
@pytest.mark.parametrize("count", [1, 5])
def test_tokens_of_every_kind(kind, count: int) -> None:  # type: ignore[no-untyped-def]
    kv, table = Paged(SHAPE, BLOCKS, 4), BlockTable(4)
    table.blocks.extend([3, 9])
    step = kv.begin([Piece("a", kind([7, 8, 9, 10, 11][:count]), 0, table)])
    assert step.token_ids.tolist() == [7, 8, 9, 10, 11][:count]


def test_tables_of_no_blocks_and_another_default_device() -> None:
    kv = Paged(SHAPE, BLOCKS, 4)
    assert kv.reserve(4, 0).block_tables.shape == (4, 0)
    pieces = some_pieces(random.Random(3), 4, decode_only=True)
    with torch.device("meta"):
        step = kv.begin(pieces)
    check(step, recount(pieces, 4, 0, max(blocks_for(piece.end, 4) for piece in pieces), every_row=False))


def test_steps_do_not_share_memory_and_have_no_other_tensors() -> None:
    kv = Paged(SHAPE, BLOCKS, 4)
    first_pieces, second_pieces = (some_pieces(random.Random(seed), 4, decode_only=False) for seed in (1, 2))
    first = kv.begin(first_pieces)
    kv.begin(second_pieces)
    width = max(blocks_for(piece.end, 4) for piece in first_pieces)
    check(first, recount(first_pieces, 4, 0, width, every_row=False))
    with pytest.raises(AttributeError, match="'token_idz'"):
        first.token_idz  # noqa: B018
