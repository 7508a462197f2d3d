"""Decode steps over tensors that stay in place, and the Triton kernel under the whole engine.

On a CPU a replay calls the recorded function again, over the same tensors and in Triton's interpreter: whatever a graph
would miss (a new tensor, a length that the host was asked for) is missed here too. With a GPU the tests run there, as graphs.
"""

from __future__ import annotations

import random

import pytest
import torch

import minikv
from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.paged import Paged
from minikv.cache.step import Piece
from minikv.engine import graph
from minikv.engine.runner import TorchRunner
from minikv.model.weights import Model, random_weights

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = minikv.ModelShape(
    layers=2, hidden=16, heads=2, kv_heads=1, head_dim=16, vocab=32, ffn=24, max_context=128, tied=False, qk_norm=True
)


@pytest.fixture(scope="module")
def model() -> Model:
    weights = random_weights(SHAPE, seed=0)
    weights["lm_head.weight"] *= 4  # far from ties
    return Model(SHAPE, weights, torch.float32, DEVICE)


def oracle(model: Model, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens without any cache; the two best logits are far enough apart for the comparison to mean something."""
    tokens: list[int] = []
    for _ in range(count):
        best = minikv.logits(model, prompt + tokens)[-1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3, "a near-tie: choose another prompt"
        tokens.append(int(best.indices[0]))
    return tokens


def prompts(*lengths: int) -> list[list[int]]:
    """Texts that begin with the same five tokens, ``lengths`` more each. The interpreter takes its time: they are short."""
    draw = random.Random(1)
    shared = draw.choices(range(SHAPE.vocab), k=5)
    return [shared + draw.choices(range(SHAPE.vocab), k=length) for length in lengths]


def test_chunks_hits_and_preemptions_give_the_oracles_tokens(model: Model) -> None:
    """Prompts and mixed steps go through the plain pass, decode steps through graphs; both through the Triton kernel."""
    runner = TorchRunner(model, 6, 4, "gpu", True)
    engine = minikv.Engine(runner=runner, max_batch_tokens=6, max_batch_requests=3)
    texts = prompts(5, 1, 3)
    outs = engine.generate(texts, minikv.Sampling(max_new_tokens=5, ignore_eos=True))
    engine.check_integrity()
    assert [out.tokens for out in outs] == [oracle(model, text, 5) for text in texts]
    assert engine.stats().preemptions, "the pool is small enough for somebody to have to give way"
    assert engine.stats().hit_tokens
    assert engine.stats().evictions
    assert runner.graphs.steps


def test_sampled_tokens_are_those_of_another_kernel(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "LEAST_WIDTH", 4)
    how = minikv.Sampling(max_new_tokens=3, temperature=0.8, top_k=9, top_p=0.9, n=2, seed=4, ignore_eos=True)
    texts = prompts(2, 1)
    want = minikv.Engine(model, num_blocks=60, block_size=4, attention="reference").generate(texts, how)
    got = minikv.Engine(runner=TorchRunner(model, 60, 4, "gpu", True)).generate(texts, how)
    assert [out.tokens for out in got] == [out.tokens for out in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


class Sequences:
    """Sequences in two pools, decoded step by step: once plainly, once through graphs."""

    def __init__(self, model: Model, count: int, num_blocks: int = 80) -> None:
        self.model = model
        self.plain, self.static = (Paged(SHAPE, num_blocks, 4, torch.float32, DEVICE, "gpu") for _ in range(2))
        self.graphs = graph.DecodeGraphs(model, self.static)
        self.free = random.Random(3).sample(range(num_blocks), num_blocks)
        self.tables = [BlockTable(4) for _ in range(count)]
        self.lengths = [0] * count
        self.addresses: dict[tuple[int, int], list[int]] = {}  # of each graph's tensors

    def pieces(self, *share: tuple[int, list[int]]) -> list[Piece]:
        out = []
        for i, tokens in share:
            table = self.tables[i]
            while len(table) < blocks_for(self.lengths[i] + len(tokens), 4):
                table.blocks.append(self.free.pop())
            out.append(Piece(i, tokens, self.lengths[i], table))
        return out

    def prefill(self, *share: tuple[int, list[int]]) -> None:
        for kv in (self.plain, self.static):
            self.forward(kv, self.pieces(*share))
        self.grow(*share)

    def forward(self, kv: Paged, pieces: list[Piece]) -> torch.Tensor:
        step = kv.begin(pieces)
        return self.model(step.token_ids, step.positions, kv, step.logit_rows)

    def grow(self, *share: tuple[int, list[int]]) -> None:
        for i, tokens in share:
            self.lengths[i] += len(tokens)

    @torch.inference_mode()
    def decode(self, *share: tuple[int, list[int]]) -> None:
        pieces = self.pieces(*share)
        assert self.graphs.can(pieces)
        want, got = self.forward(self.plain, pieces), self.graphs(pieces)
        for size, (step, _) in self.graphs.steps.items():  # what a recorded graph would go on reading
            now = [value.data_ptr() for value in vars(step).values() if isinstance(value, torch.Tensor)]
            assert self.addresses.setdefault(size, now) == now
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        torch.testing.assert_close(self.static.pool[:-1], self.plain.pool[:-1], rtol=1e-5, atol=1e-5)
        self.grow(*share)


def test_replays_follow_other_batches_lengths_and_tables(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches grow and shrink within a bucket and across them, sequences change places, end, and give their blocks away."""
    monkeypatch.setattr(graph, "LEAST_WIDTH", 4)
    draw = random.Random(5)
    sequences = Sequences(model, 6)
    with torch.inference_mode():
        sequences.prefill((0, [1, 2, 3]), (1, [4] * 12), (2, [5, 6]), (3, [7] * 8), (4, [8]), (5, [9] * 5))
    for members in ([0, 1, 2], [2, 1, 0], [1, 3, 2, 4], [5], [0, 1, 2, 3, 4, 5]):
        sequences.decode(*((i, [draw.randrange(SHAPE.vocab)]) for i in members))
    sequences.free[:0] = sequences.tables[1].blocks  # 1 ends; another text takes its place, in other blocks
    sequences.tables[1], sequences.lengths[1] = BlockTable(4), 0
    with torch.inference_mode():
        sequences.prefill((1, [3] * 6))
    sequences.decode(*((i, [draw.randrange(SHAPE.vocab)]) for i in (1, 2, 0)))
    assert set(sequences.graphs.steps) == {(4, 4), (1, 4), (8, 4)}  # six batches, three recordings


def test_a_longer_context_gets_wider_tables_and_what_was_reserved_stays_in_place(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "LEAST_WIDTH", 2)
    sequences = Sequences(model, 2)
    sequences.graphs.prepare([1, 2], 8)
    addresses = {size: step.buffer.data_ptr() for size, (step, _) in sequences.graphs.steps.items()}
    assert set(addresses) == {(1, 2), (2, 2)}
    with torch.inference_mode():
        sequences.prefill((0, [1] * 6), (1, [2] * 3))
    for token in range(4):  # sequence 0 grows from 6 to 10 tokens, over its second block of 4
        sequences.decode((0, [token]), (1, [token]))
    sequences.decode((1, [3]))
    assert set(sequences.graphs.steps) == {(1, 2), (2, 2), (2, 4)}
    assert all(sequences.graphs.steps[size][0].buffer.data_ptr() == address for size, address in addresses.items())
    sequences.graphs.forget()
    assert not sequences.graphs.steps


def test_what_is_no_decode_step_is_not_replayed(model: Model) -> None:
    sequences = Sequences(model, 3)
    graphs, kv = sequences.graphs, sequences.static
    assert not graphs.can(sequences.pieces((0, [1, 2])))
    assert not graphs.can([Piece(0, [1], 0, sequences.tables[0], "none")])
    assert not graph.DecodeGraphs(model, kv, 2).can(sequences.pieces((0, [1]), (1, [1]), (2, [1])))
    step = kv.reserve(2, 2)
    before = step.buffer.clone()
    for wrong in (((0, [1]), (1, [1]), (2, [1])), ((0, [1, 2]),), ((0, [1]), (1, [1] * 9))):
        with pytest.raises(ValueError, match="no decode step of at most 2 with tables of 2"):
            kv.begin(sequences.pieces(*wrong), into=step)
    assert torch.equal(step.buffer, before)


def test_batches_are_padded_to_few_sizes() -> None:
    assert [graph.bucket(n) for n in (1, 2, 3, 5, 8, 9, 16, 17, 33, 256)] == [1, 2, 4, 8, 8, 16, 16, 32, 48, 256]
    assert all(graph.bucket(n) >= n for n in range(1, 300))
    assert len({graph.bucket(n) for n in range(1, 257)}) == 20


def test_a_runner_records_only_where_it_helps_and_forgets_with_the_weights(model: Model) -> None:
    assert TorchRunner(model, 4, 4, "reference", True).graphs is None
    assert (TorchRunner(model, 4, 4, "gpu").graphs is not None) == (DEVICE.type == "cuda")
    runner = TorchRunner(model, 4, 4, "gpu", True)
    runner.graphs.prepare([1], 8)
    runner.weights_changed()
    assert not runner.graphs.steps
