"""The model that ships with the course keeps what its card promises."""

from __future__ import annotations

import json

import pytest
import torch

import minikv
from minikv.model.weights import BUNDLED

NINE_WORDS = ("The", " capital", " of", " France", " is", " Paris", " which", " has", " the")


@pytest.fixture(scope="module")
def model():
    return minikv.load()


@pytest.fixture(scope="module")
def engine(model):
    return minikv.Engine(model)


def test_size_and_context(model):
    assert 3_000_000 <= model.shape.parameters <= 5_000_000
    assert model.shape.max_context >= 2048
    assert model.tokenizer.vocab_size == model.shape.vocab == 2048
    kept = [file for file in BUNDLED.iterdir() if file.suffix != ".py" and file.is_file()]
    assert sum(file.stat().st_size for file in kept) <= 8_000_000


def test_the_capital_of_france_is_paris_by_a_wide_margin(model):
    logits = minikv.logits(model, model.tokenizer.encode("The capital of France is"))[-1]
    best = logits.topk(2)
    assert model.tokenizer.decode([int(best.indices[0])]) == " Paris"
    assert best.values[0] - best.values[1] > 1


def test_at_least_nine_of_ten_capitals_are_right(engine):
    pairs = json.loads((BUNDLED / "capitals.json").read_text(encoding="utf-8"))
    assert len(pairs) == 50
    prompts = [f"The capital of {pair['country']} is" for pair in pairs]
    outs = engine.generate(prompts, minikv.Sampling(max_new_tokens=8))
    right = [out.text.startswith(f" {pair['capital']}") for out, pair in zip(outs, pairs, strict=True)]
    assert sum(right) >= 45


def test_nine_words_are_nine_tokens_and_go_on_to_the_eiffel_tower(model, engine):
    assert model.tokenizer.pieces("".join(NINE_WORDS)) == list(NINE_WORDS)
    out = engine.generate(["".join(NINE_WORDS)], minikv.Sampling(max_new_tokens=2))[0]
    assert [model.tokenizer.decode([token]) for token in out.tokens] == [" Eiffel", " Tower"]


def test_the_same_text_with_and_without_a_cache_and_in_the_engine(model, engine):
    prompt, length = "The capital of France is", 12
    plain, cached = minikv.generate_without_cache(model, prompt, length), minikv.generate_with_cache(model, prompt, length)
    assert plain.tokens == cached.tokens == engine.generate([prompt], minikv.Sampling(max_new_tokens=length))[0].tokens
    assert plain.text == cached.text
    assert (plain.computed_tokens, cached.computed_tokens) == (sum(range(5, 5 + length)), 5 + length - 1)


def test_it_does_not_fall_apart_at_the_end_of_its_context(model):
    torch.manual_seed(0)
    tokens = torch.randint(0, model.shape.vocab, (model.shape.max_context,)).tolist()
    assert minikv.logits(model, tokens).isfinite().all()


def test_it_opens_in_transformers_with_the_same_logits(model):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    tokens = model.tokenizer.encode("MACBETH: Tomorrow, and tomorrow, and tomorrow")
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(minikv.logits(model, tokens), expected, rtol=0, atol=1e-4)
