"""A tiny float64 model whose tokens can be compared exactly, and runners that compute nothing or fail on purpose."""

from __future__ import annotations

import hashlib

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import minikv
from minikv.engine.runner import StepResult, TorchRunner
from minikv.model.tokenizer import Tokenizer

SHAPE = minikv.ModelShape(
    layers=2, hidden=16, heads=4, kv_heads=2, head_dim=6, vocab=32, ffn=24, max_context=128, tied=False, name="tiny"
)  # fmt: skip


@pytest.fixture(scope="session")
def model():
    return minikv.load(shape=SHAPE, seed=0, dtype=torch.float64)


@pytest.fixture(scope="session")
def alone(model):
    """(tokens, logprobs) of each sample of a request that has an engine to itself; no prefix cache, a step per prompt."""
    known = {}

    def alone(prompt, sampling):
        key = (tuple(prompt), sampling)
        if key not in known:
            engine = minikv.Engine(model, num_blocks=16 * sampling.n, block_size=8, prefix_caching=False, attention="reference")
            known[key] = [(out.tokens, out.logprobs) for out in engine.generate([prompt], sampling)]
        return known[key]

    return alone


class FailingRunner(TorchRunner):
    """Raises where ``fails`` (a list, used up step by step) says "before" or "after" the step was computed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.fails = []

    def execute(self, plan, now):
        fail = self.fails.pop(0) if self.fails else ""
        if fail == "before":
            raise RuntimeError("the device is lost")
        result = super().execute(plan, now)
        if fail == "after":
            raise RuntimeError("the device is lost")
        return result


@pytest.fixture(scope="session")
def failing_runner():
    return FailingRunner


class FakeRunner:
    """Computes nothing. A token is a hash of (seed, sample, index), or comes from ``script`` (by index); a step takes a second."""

    def __init__(self, num_blocks=8, block_size=4, *, vocab=1000, max_context=1000, tokenizer=None, stop_tokens=(), script=None):
        self.num_blocks, self.block_size, self.vocab, self.max_context = num_blocks, block_size, vocab, max_context
        self.tokenizer, self.stop_tokens, self.script = tokenizer, stop_tokens, script
        self.plans = []
        self.clock = 0.0
        self.version = 0

    def content(self):
        return {"model": f"fake {self.version}"}

    def weights_changed(self):
        self.version += 1

    def now(self):
        return self.clock

    def token(self, draw):
        if self.script is not None:
            return self.script[draw.index]
        return int.from_bytes(hashlib.sha256(repr((draw.seed, draw.sample, draw.index)).encode()).digest()[:8]) % self.vocab

    def execute(self, plan, now):
        self.plans.append([(piece.sequence.request.request_id, piece.start, len(piece.tokens)) for piece in plan.pieces])
        self.clock = now + 1.0
        return StepResult([self.token(draw) for draw in plan.draws], [0.0] * len(plan.draws), self.clock)


@pytest.fixture(scope="session")
def fake_runner():
    return FakeRunner


@pytest.fixture(scope="session")
def byte_tokenizer():
    """One token a byte; the id of a character is its place in the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner)


@pytest.fixture(scope="session")
def drain():
    """Step until nothing is left, check the books after each step, and return everything that was handed out, by (id, sample)."""

    def drain(engine, most_steps=2000):
        outputs = {}
        for _ in range(most_steps):
            if not engine.has_work:
                return outputs
            for output in engine.step():
                outputs[output.request_id, output.sample] = output
            engine.check_integrity()
        raise AssertionError(f"{most_steps} steps were not enough")

    return drain
