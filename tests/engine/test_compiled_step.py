"""The compiled step is the same forward pass as transformer.py: the same logits, the same K and V in the pool, nothing else touched.

What is covered, each step with every wanted row compared with an uncached pass and with the torch path over the reference attention:

    models        GQA groups 1, 2, 4 and 5 (one KV head); q/k norm, bias, tied head, each on and off; odd sizes; head_dim 2, 6, 32
    block sizes   1, 3, 4, 16, padded steps among them
    steps         1 to 12 sequences of ragged lengths, a token each; chunks among them; rows that want no logits
    dtypes        float64 within 1e-10, float32 within 1e-4
    teams         one thread, torch's, Python's; two engines in two threads

The pool is filled with nan beforehand and the blocks of a table lie all over it.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import minikv
from minikv.cache.attention import cpu
from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.paged import Paged
from minikv.cache.step import Piece
from minikv.compiled import threads
from minikv.compiled.sequence import TICKETS
from minikv.engine import compiled_step
from minikv.engine.compiled_step import CompiledStep
from minikv.model import transformer
from minikv.model.weights import Model, random_weights

MOST_SEQUENCES = 13  # more than the rows that stay in the nearest cache, and no multiple of a tile

SHAPES = {
    "group 1": {"heads": 2, "kv_heads": 2, "head_dim": 6, "hidden": 24, "ffn": 20},
    "group 2, q/k norm": {"heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 24, "ffn": 80, "qk_norm": True, "tied": False},
    "group 4, bias": {"heads": 4, "kv_heads": 1, "head_dim": 2, "hidden": 24, "ffn": 20, "qkv_bias": True, "tied": False},
    "group 5, both": {"heads": 5, "kv_heads": 1, "head_dim": 32, "hidden": 48, "ffn": 80, "qk_norm": True, "qkv_bias": True},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def build(name: str, dtype: torch.dtype = torch.float64) -> Model:
    shape = minikv.ModelShape(layers=2, vocab=33, max_context=96, **SHAPES[name])
    weights = random_weights(shape, seed=1)
    generator = torch.Generator().manual_seed(2)
    for key, weight in weights.items():
        if key.endswith("norm.weight"):
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    weights["model.embed_tokens.weight"] *= 20
    return Model(shape, weights, dtype)


shared = functools.cache(build)  # for the tests that leave it as it is


def bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.int64 if pool.dtype == torch.float64 else torch.int32).clone()


@pytest.fixture(autouse=True)
def plain_oracle(monkeypatch):
    """Nothing that is compiled takes part in what the compiled step is compared with."""
    monkeypatch.setattr(transformer, "linear", F.linear)


class Pair:
    """The same sequences in two pools: torch's pass over the reference attention, and the compiled one."""

    def __init__(self, model: Model, block_size: int = 4, bucket=lambda tokens: tokens) -> None:
        self.model, self.block_size = model, block_size
        num_blocks = 14 * blocks_for(model.shape.max_context, block_size)
        self.theirs = Paged(model.shape, num_blocks, block_size, model.dtype, attention="reference", bucket=bucket)
        self.ours = Paged(model.shape, num_blocks, block_size, model.dtype, attention="cpu", bucket=bucket)
        self.compiled = CompiledStep(model)
        for kv in (self.theirs, self.ours):
            kv.pool.fill_(torch.nan)
        self.free = random.Random(block_size).sample(range(num_blocks), num_blocks)
        self.texts: dict[int, list[int]] = {}
        self.tables: dict[int, BlockTable] = {}

    def pieces(self, share: list[tuple[int, list[int], str]]) -> list[Piece]:
        out = []
        for sequence, tokens, logits in share:
            text = self.texts.setdefault(sequence, [])
            table = self.tables.setdefault(sequence, BlockTable(self.block_size))
            start = len(text)
            text += tokens
            while len(table) < blocks_for(len(text), self.block_size):
                table.blocks.append(self.free.pop())
            out.append(Piece(sequence, tokens, start, table, logits))
        return out

    def fill(self, lengths: list[int], seed: int = 0) -> None:
        """Sequences 0, 1, ... get so many tokens, by torch's pass, and both pools the same K and V."""
        dice = random.Random(seed)
        for sequence, length in enumerate(lengths):
            if length:
                step = self.theirs.begin(self.pieces([(sequence, dice.choices(range(33), k=length), "none")]))
                with torch.inference_mode():
                    self.model(step.token_ids, step.positions, self.theirs, step.logit_rows)
        self.ours.pool.copy_(self.theirs.pool)

    def run(self, share: list[tuple[int, list[int], str]], oracle: bool = True) -> torch.Tensor:
        """One step both ways, everything compared; the compiled step's logits."""
        pieces = self.pieces(share)
        with torch.inference_mode():
            step = self.theirs.begin(pieces)
            want = self.model(step.token_ids, step.positions, self.theirs, step.logit_rows)
            before, step = bits(self.ours.pool), self.ours.begin(pieces)
            assert self.compiled.can(self.ours, step)
            got, best = self.compiled(self.ours, step)
        assert torch.equal(best.tokens, got.argmax(-1))
        torch.testing.assert_close(best.sums, got.logsumexp(-1))
        torch.testing.assert_close(best.logprobs, got.amax(-1) - got.logsumexp(-1))
        close = functools.partial(torch.testing.assert_close, rtol=0, atol=TOLERANCE[self.model.dtype])
        close(got, want)
        written = torch.zeros(self.ours.pool.shape[0], self.block_size, dtype=torch.bool)
        written.view(-1)[step.slots] = True
        changed = (bits(self.ours.pool) != before).any(5).any(3).any(2).any(1)  # [block, slot]
        assert not (changed & ~written).any()
        written[self.ours.scratch] = False
        ours, theirs = (kv.pool.permute(0, 4, 1, 2, 3, 5)[written] for kv in (self.ours, self.theirs))
        close(ours, theirs)
        if oracle:
            rows = [minikv.logits(self.model, self.texts[p.sequence])[p.start :] for p in pieces if p.logits != "none"]
            kinds = [p.logits for p in pieces if p.logits != "none"]
            if rows:
                close(got, torch.cat([row if kind == "all" else row[-1:] for row, kind in zip(rows, kinds, strict=True)]))
        self.ours.pool.copy_(self.theirs.pool)  # each step is compared alone: float32's errors do not add up
        return got.clone()  # the next step writes over it


@DTYPES
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_every_number_of_sequences(name, block_size, dtype):
    for count in range(1, MOST_SEQUENCES + 1):
        pair = Pair(shared(name, dtype), block_size)
        pair.fill([(7 * i + count) % (2 * block_size + 3) for i in range(count)], seed=count)
        for token in range(2):
            pair.run([(i, [(i + token) % 33], "last") for i in range(count)], oracle=count in (1, 5, MOST_SEQUENCES))


@DTYPES
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_beside_decodes_and_rows_without_logits(name, dtype):
    dice = random.Random(3)
    for block_size in (1, 3, 4, 16):
        pair = Pair(shared(name, dtype), block_size)
        pair.fill([0, 5, 17, 1, 30])
        pair.run([(0, dice.choices(range(33), k=14), "all")])
        pair.run([(1, dice.choices(range(33), k=5), "none")])
        for _ in range(4):
            share = []
            for sequence in dice.sample(range(5), dice.randint(1, 5)):
                room = 96 - len(pair.texts.get(sequence, []))
                count = min(dice.choice([1, 1, 2, 7, 29]), room)
                if count:
                    share.append((sequence, dice.choices(range(33), k=count), dice.choice(["none", "last", "all"])))
            if share:
                pair.run(share)


@DTYPES
@pytest.mark.parametrize("name", SHAPES)
def test_more_tokens_than_a_ticket_takes(name, dtype):
    """Two rows of tickets in every product, whole tiles of queries and a rest, with and without a past."""
    pair = Pair(shared(name, dtype), block_size=4)
    pair.fill([0, 21])
    dice = random.Random(4)
    pair.run([(0, dice.choices(range(33), k=96), "last"), (1, dice.choices(range(33), k=70), "all"), (2, [3], "last")])


def test_a_context_of_several_tiles(monkeypatch):
    monkeypatch.setattr(cpu, "ALONE_BYTES", 0)
    shape = minikv.ModelShape(layers=2, vocab=33, max_context=700, **SHAPES["group 5, both"])
    pair = Pair(Model(shape, random_weights(shape), torch.float64), 16)
    pair.fill([650, 256, 255])
    pair.run([(0, [1, 2, 3], "all"), (1, [4], "last"), (2, [5, 6], "all")])


def test_padded_steps():
    pair = Pair(shared("group 2, q/k norm"), bucket=lambda tokens: -(-tokens // 4) * 4)
    pair.fill([3, 9, 0])
    pair.run([(0, [1], "last"), (2, [2, 3], "all")])
    pair.run([(0, [1], "last"), (1, [4], "none"), (2, [2, 3, 1], "last")])


def test_no_row_wanted_gives_no_row():
    pair = Pair(shared("group 1"))
    assert pair.run([(0, [1, 2, 3], "none")]).shape == (0, 33)


# ---------------------------------------------------------------- weights


def test_weights_written_to_count_at_once():
    model = build("group 5, both")
    pair = Pair(model)
    pair.fill([6])
    pair.run([(0, [3], "last")])
    first = pair.run([(1, [3, 4, 5], "last")])
    with torch.no_grad():
        for tensor in tensors(model):
            tensor.mul_(1.25)
    assert not torch.allclose(first, pair.run([(2, [3, 4, 5], "last")]))


def tensors(model):
    layers = [value for layer in model.layers for value in vars(layer).values() if value is not None]
    return [model.embedding, model.norm, *layers]


def test_replaced_weights_count_at_once():
    """Each attribute by itself: a new tensor, or the old one with new data."""
    model = build("group 5, both")
    pair = Pair(model)
    last = pair.run([(0, [3, 4, 5], "last")])
    holders = [(model, name) for name in ("embedding", "norm", "cos", "sin", "head")] + [
        (model.layers[1], n) for n in vars(model.layers[1])
    ]
    for i, (holder, name) in enumerate(holders):
        old = getattr(holder, name)
        new = old + 0.2 * torch.randn(old.shape, dtype=old.dtype, generator=torch.Generator().manual_seed(i))
        if i % 2:
            setattr(holder, name, new)
        else:
            old.data = new
        now = pair.run([(i + 1, [3, 4, 5], "last")])
        if name != "head":  # tied: embedding.data is the head's too
            assert not torch.allclose(last, now, rtol=0, atol=1e-6), name
        last = now


def test_a_bias_that_comes_and_goes():
    model = build("group 4, bias")
    pair = Pair(model)
    bias = model.layers[0].qkv_bias
    a = pair.run([(0, [3, 4, 5], "last")])
    model.layers[0].qkv_bias = None
    b = pair.run([(1, [3, 4, 5], "last")])
    model.layers[0].qkv_bias = bias
    c = pair.run([(2, [3, 4, 5], "last")])
    assert torch.allclose(a, c, rtol=0, atol=1e-10)
    assert not torch.allclose(a, b)


def test_weights_that_lie_apart_or_have_other_sizes_are_left_to_torch():
    model = build("group 1")
    pair = Pair(model)
    step = pair.ours.begin(pair.pieces([(0, [1], "last")]))
    assert pair.compiled.can(pair.ours, step)
    down = model.layers[0].down
    model.layers[0].down = down.T.contiguous().T
    assert not pair.compiled.can(pair.ours, step)
    model.layers[0].down = down[:, :-1].contiguous()
    assert not pair.compiled.can(pair.ours, step)
    model.layers[0].down = down.float()
    assert not pair.compiled.can(pair.ours, step)
    model.layers[0].down = down
    assert pair.compiled.can(pair.ours, step)


@pytest.mark.parametrize(
    "cut",
    [
        lambda w: w[:-1],
        lambda w: w.view(w.shape[1], w.shape[0]),
        lambda w: w.flatten(),
        lambda w: w.view(torch.int64),
        lambda w: w.as_strided(w.shape, (1, w.shape[0])),
    ],
)
@pytest.mark.parametrize("name", ["qkv", "gate_up", "down", "out"])
def test_a_part_or_another_view_of_the_same_memory_is_noticed(name, cut):
    pair = Pair(build("group 1"))
    step, layer = pair.ours.begin(pair.pieces([(0, [1], "last")])), pair.compiled.model.layers[0]
    assert pair.compiled.can(pair.ours, step)
    whole = getattr(layer, name)
    setattr(layer, name, cut(whole))
    assert getattr(layer, name).data_ptr() == whole.data_ptr()
    assert not pair.compiled.can(pair.ours, step)
    setattr(layer, name, whole)
    assert pair.compiled.can(pair.ours, step)


@pytest.mark.parametrize("cut", [lambda w: w[:-1], lambda w: w.view(w.shape[1], w.shape[0]), lambda w: w.view(torch.int64)])
def test_data_that_is_another_view_of_the_same_memory_is_noticed(cut):
    pair = Pair(build("group 1"))
    step, down = pair.ours.begin(pair.pieces([(0, [1], "last")])), pair.model.layers[0].down
    assert pair.compiled.can(pair.ours, step)
    whole = down.data
    down.data = cut(whole)
    assert down.data_ptr() == whole.data_ptr()
    assert not pair.compiled.can(pair.ours, step)
    down.data = whole
    assert pair.compiled.can(pair.ours, step)


def test_another_default_device_is_nothing_to_the_kernels():
    """They write to addresses, and a tensor on another device has none here."""
    model, sampling = build("group 2, q/k norm"), minikv.Sampling(max_new_tokens=3, ignore_eos=True)
    want = [output.tokens for output in minikv.Engine(model, num_blocks=64).generate([[1, 2], [3]], sampling)]
    engine = minikv.Engine(model, num_blocks=64)
    with torch.device("meta"):
        assert [output.tokens for output in engine.generate([[1, 2], [3]], sampling)] == want


def test_a_token_that_is_not_in_the_vocabulary_is_nan_and_harms_nobody_else():
    pair = Pair(build("group 1"))
    step = pair.ours.begin(pair.pieces([(0, [33], "last"), (1, [2], "last")]))
    assert pair.compiled.can(pair.ours, step)
    logits, best = pair.compiled(pair.ours, step)
    assert logits[0].isnan().all()
    assert best.tokens[0] in range(33)
    torch.testing.assert_close(logits[1], minikv.logits(pair.model, [2])[0], rtol=0, atol=1e-10)


def test_a_step_is_written_down_once_whoever_computes_it(monkeypatch):
    model, begun, begin = build("group 1"), [], Paged.begin
    monkeypatch.setattr(Paged, "begin", lambda *arguments: (begun.append(True), begin(*arguments))[1])
    for replace in (False, True):
        if replace:  # left to torch
            model.layers[0].down = model.layers[0].down.T.contiguous().T
        begun.clear()
        minikv.Engine(model, num_blocks=64).generate([[1, 2]], minikv.Sampling(max_new_tokens=5, ignore_eos=True))
        assert len(begun) == 5


def test_tickets_are_counted_anew_when_tokens_rows_or_tiles_change_alone():
    """Too few, and a kernel begins before the one in front of it is done; too many, and it waits for ever."""
    pair = Pair(build("group 1"))
    shares = (
        [(0, [1] * 40, "last"), (1, [1], "none")],  # 41 tokens, 1 row, 2 tiles
        [(2, [1] * 60, "last")],  # more tokens
        [(3, [1] * 60, "all")],  # more rows
        [(4, [1] * 60, "none")],  # no rows
        [(5, [1] * 20, "none"), (6, [1] * 20, "none"), (7, [1] * 20, "none")],  # more tiles
    )
    counted = []
    for share in shares:
        step, fresh = pair.ours.begin(pair.pieces(share)), CompiledStep(pair.model)
        for compiled in (fresh, pair.compiled):
            assert compiled.can(pair.ours, step)
            with torch.inference_mode():
                compiled(pair.ours, step)
        assert (pair.compiled.kernels[:, TICKETS] == fresh.kernels[:, TICKETS]).all()
        assert pair.compiled.arguments[0] == fresh.arguments[0]
        counted.append(fresh.counted)
    assert counted == [(41, 1, 2), (60, 1, 2), (60, 60, 2), (60, 0, 2), (60, 0, 3)]


def test_a_refused_weight_stays_refused_until_it_changes():
    model = build("group 1")
    pair = Pair(model)
    step = pair.ours.begin(pair.pieces([(0, [1], "last")]))
    model.layers[0].down = model.layers[0].down.T.contiguous().T
    assert not pair.compiled.can(pair.ours, step)
    assert not pair.compiled.can(pair.ours, step)


# ---------------------------------------------------------------- which step goes where


def test_what_the_compiled_step_does_not_do():
    pair = Pair(shared("group 1"))
    assert pair.compiled.can(pair.ours, pair.ours.begin(pair.pieces([(0, [1] * 3, "last")])))
    assert pair.compiled.can(pair.ours, pair.ours.begin(pair.pieces([(1, [1] * 90, "last")])))
    assert not pair.compiled.can(pair.theirs, pair.theirs.begin(pair.pieces([(2, [1] * 3, "last")])))
    assert not pair.compiled.can(pair.ours, _too_long(pair))


def _too_long(pair):
    """A step whose last position has no angles in the rotary table."""
    table = BlockTable(pair.block_size)
    table.blocks.extend(range(blocks_for(97, pair.block_size)))
    return pair.ours.begin([Piece("long", [1], 96, table)])


def test_the_engine_uses_it_for_every_step(monkeypatch):
    seen = []
    call = CompiledStep.__call__
    monkeypatch.setattr(CompiledStep, "__call__", lambda self, kv, step: (seen.append(len(step.token_ids)), call(self, kv, step))[1])
    model = shared("group 2, q/k norm")
    prompts = [list(range(n)) for n in (3, 20, 9)]
    sampling = minikv.Sampling(max_new_tokens=5, ignore_eos=True)
    plain = minikv.Engine(model, num_blocks=64, block_size=4, attention="reference").generate(prompts, sampling)
    assert not seen
    outs = minikv.Engine(model, num_blocks=64, block_size=4).generate(prompts, sampling)
    assert [out.tokens for out in outs] == [out.tokens for out in plain]
    assert seen == [32, 3, 3, 3, 3]


def test_what_somebody_has_taught_model_or_cache_is_not_passed_over(monkeypatch):
    for owner, name in ((Model, "_norm"), (Model, "_project"), (Paged, "attend")):
        pair = Pair(build("group 1"))
        step = pair.ours.begin(pair.pieces([(0, [1, 2], "last")]))
        assert pair.compiled.can(pair.ours, step)
        thing = pair.model if owner is Model else pair.ours
        with monkeypatch.context() as patch:
            patch.setattr(thing, name, getattr(thing, name))
            assert not pair.compiled.can(pair.ours, step)
        kind = type(thing)
        thing.__class__ = type("Mine", (kind,), {name: lambda *_: None})
        assert not pair.compiled.can(pair.ours, step)


def test_a_pool_of_another_shape_and_weights_that_turn_are_left_to_the_model():
    pair = Pair(build("group 1"))
    pieces = pair.pieces([(0, [1, 2], "last")])
    assert pair.compiled.can(pair.ours, pair.ours.begin(pieces))
    other = minikv.ModelShape(layers=1, vocab=33, max_context=96, **SHAPES["group 1"])
    smaller = Paged(other, pair.ours.num_blocks, 4, torch.float64, attention="cpu")
    assert not pair.compiled.can(smaller, smaller.begin(pieces))
    pair.model.layers[0].out.t_()  # the same tensor, the same address
    assert not pair.compiled.can(pair.ours, pair.ours.begin(pieces))


@pytest.mark.parametrize("where", ["the kernels", "the addresses", "the rooms"])
@pytest.mark.parametrize("later", [False, True], ids=["at the first step", "after new weights"])
def test_whoever_interrupts_the_preparations_finds_them_done_anew(where, later, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    pair = Pair(build("group 2, q/k norm"))
    pair.fill([5, 9])
    if later:
        pair.run([(0, [1], "last"), (1, [2], "last")])
        pair.model.layers[1].qkv = pair.model.layers[1].qkv * 2
        pair.theirs.pool.copy_(pair.ours.pool)
    share = [(0, list(range(20)), "last"), (1, [2, 3], "all")]
    owner, name = {"the kernels": (cpu, "kernel"), "the addresses": (compiled_step, "_address"), "the rooms": (torch, "empty")}[where]
    step = pair.ours.begin([Piece("nobody", [1] * 20, 0, _table(pair, 20))])
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.compiled.can(pair.ours, step) and pair.compiled(pair.ours, step)
    pair.run(share, oracle=not later)


def test_a_larger_step_that_is_interrupted_leaves_the_smaller_ones_right(monkeypatch):
    """Its results would have had a new place, and the kernels still know the old one, which is nobody's by now."""

    def interrupt(tensor):
        raise KeyboardInterrupt

    pair = Pair(build("group 2, q/k norm"))
    pair.run([(0, [1, 2], "all")])
    with monkeypatch.context() as patch, torch.inference_mode():
        step = pair.ours.begin([Piece("nobody", [1] * 20, 0, _table(pair, 20))])
        assert pair.compiled.can(pair.ours, step)
        patch.setattr(compiled_step, "_address", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.compiled(pair.ours, step)
    pair.run([(0, [3, 4], "all")])


def test_a_count_of_tickets_that_is_interrupted_is_made_again(monkeypatch):
    """Half of another step's tickets, and a kernel waits for ever for what nobody will do."""
    pair = Pair(build("group 2, q/k norm"))
    pair.run([(0, [1, 2], "last")])
    right = pair.compiled.kernels[:, TICKETS].copy()
    calls = []

    def interrupt(rows, outputs):
        calls.append(rows)
        if len(calls) == 4:  # those of the layers are written down, the head's are next
            raise KeyboardInterrupt
        return 1000

    with monkeypatch.context() as patch:
        step = pair.ours.begin([Piece("nobody", [1], 0, _table(pair, 1))])
        assert pair.compiled.can(pair.ours, step)
        patch.setattr(compiled_step.fused, "tickets", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.compiled(pair.ours, step)
    assert (pair.compiled.kernels[:, TICKETS] != right).any()
    pair.run([(0, [3, 4], "last")])
    assert (pair.compiled.kernels[:, TICKETS] == right).all()


def _table(pair, tokens):
    table = BlockTable(pair.block_size)
    table.blocks.extend(pair.free.pop() for _ in range(blocks_for(tokens, pair.block_size)))
    return table


def test_a_model_with_a_call_of_its_own_is_called():
    class Mute(Model):
        def __call__(self, token_ids, positions, kv, rows=None):
            return torch.full((len(rows), self.shape.vocab), -1.0, dtype=self.dtype).index_fill(1, torch.tensor([7]), 1.0)

    shape = minikv.ModelShape(layers=2, vocab=33, max_context=96, **SHAPES["group 1"])
    mute = Mute(shape, random_weights(shape), torch.float64)
    out = minikv.Engine(mute, num_blocks=16, block_size=4).generate([[1, 2]], minikv.Sampling(max_new_tokens=4, ignore_eos=True))[0]
    assert out.tokens == [7] * 4


@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_torch_modes_around_the_engine_may_change_between_steps(attention):
    """Tensors that were made under inference mode may not be written to outside of it."""
    model = build("group 2, q/k norm")
    sampling = minikv.Sampling(max_new_tokens=6, ignore_eos=True, temperature=1.0, seed=3, n=2)
    model.head.requires_grad_()
    texts = []
    for inside in ([], [0, 2, 4], [1, 3, 5], range(6)):
        with torch.inference_mode(0 in inside):
            engine = minikv.Engine(model, num_blocks=64, block_size=4, attention=attention)
        engine.add("one", [1, 2, 3], sampling)
        engine.add("two", [4, 5], dataclasses.replace(sampling, temperature=0.0, n=1))
        outputs = {}
        for step in range(7):
            with torch.inference_mode(step in inside):
                outputs |= {(output.request_id, output.sample): output for output in engine.step()}
        assert not engine.has_work
        texts.append({key: output.tokens for key, output in outputs.items()})
    assert len(texts[0]) == 3
    assert all(text == texts[0] for text in texts)


# ---------------------------------------------------------------- threads


@pytest.fixture
def always_together(monkeypatch):
    """Even the smallest matrix goes to all threads."""
    monkeypatch.setattr(compiled_step, "ALONE_NUMBERS", 0)
    monkeypatch.setattr(cpu, "ALONE_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.parametrize("python", [False, True], ids=["torch's threads", "Python's threads"])
def test_teams(python, always_together, monkeypatch):
    if python:
        monkeypatch.setattr(threads, "_team", lambda: threads._run_on_python_threads)
    for name in SHAPES:
        pair = Pair(shared(name))
        pair.fill([4, 11, 25])
        for token in range(10):
            pair.run([(0, [token], "last"), (1, [token, 2], "all"), (2, [token], "none")], oracle=token == 9)


def test_a_thread_that_comes_when_all_is_done_walks_through():
    pair = Pair(shared("group 5, both"))
    pair.fill([4, 11])
    pair.run([(0, [1], "last"), (1, [2, 3], "all")])
    before = bits(pair.ours.pool)
    threads.run(pair.compiled.sequence, pair.compiled.arguments.ctypes.data, 1)
    assert torch.equal(bits(pair.ours.pool), before)
    pair.run([(0, [1], "last"), (1, [2, 3], "all")])


TWO_THREADS = """
    import threading, torch
    from minikv.cache.attention import cpu
    from minikv.engine import compiled_step
    import minikv
    from test_compiled_step import shared

    compiled_step.ALONE_NUMBERS = cpu.ALONE_BYTES = 0
    torch.set_num_threads(2)
    model, sampling = shared("group 2, q/k norm"), minikv.Sampling(max_new_tokens=40, ignore_eos=True)
    prompts = [[1, 2, 3], [4] * 11, [5, 6] * 8]
    want = [out.tokens for out in minikv.Engine(model, num_blocks=64, attention="reference").generate(prompts, sampling)]
    wrong = []
    def work():
        engine = minikv.Engine(model, num_blocks=64)
        for _ in range(5):
            if [out.tokens for out in engine.generate(prompts, sampling)] != want:
                wrong.append(1)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print("wrong:", len(wrong))
"""


def test_two_engines_in_two_threads():
    """In a process of its own: a runtime that cannot bear it aborts the process."""
    code = f"import sys; sys.path[:0] = {[__file__.rsplit('/', 1)[0], *sys.path]!r}\n" + textwrap.dedent(TWO_THREADS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "wrong: 0"
