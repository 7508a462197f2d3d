"""What the bundled model can do, measured with our own forward pass: `python -m minikv.model.bundled.evaluate`.

Three questions. How surprised is it, in nats per token, by text that it never saw, and does it get better or worse
further into a long context? Does it know the 50 capitals of capitals.json when it must complete "The capital of X is"?
And does a rounding error matter: how far is the best next token ahead of the second best, in logits, along the way?
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from minikv.model.bundled import corpus
from minikv.model.transformer import Transformer
from minikv.shape.model_shape import ModelShape

HERE = Path(__file__).parent
BUCKETS = ((0, 256), (256, 1024), (1024, 2048), (2048, 4096))  # of positions, for the loss by position
PROMPTS = (
    "The capital of France is",
    "The capital of France is Paris which has the",
    "Q: What is the capital of Japan?\nA:",
    "People in Brazil speak",
    "HAMLET:\nTo be,",
    "ROMEO:\nBut soft! what light",
)


class WholeSequences:
    """The smallest thing that answers the model's seam: every sequence is there from its first token to its last.

    The packed tokens are `batch` sequences of `length` tokens each; attention is causal inside each of them. Nothing is
    stored, and gradients flow through, so the same object serves training and evaluation.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [batch x length, heads, head_dim]; k, v [batch x length, kv_heads, head_dim] -> like q."""
        q, k, v = (t.unflatten(0, (self.batch, self.length)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)  # from [batch, heads, length, head_dim]


def forward(model: Transformer, token_ids: Tensor) -> Tensor:
    """Logits [batch, length, vocab] for whole sequences token_ids [batch, length] (int64), each from position 0."""
    batch, length = token_ids.shape
    positions = torch.arange(length).repeat(batch)
    return model(token_ids.flatten(), positions, WholeSequences(batch, length)).unflatten(0, (batch, length))


def open_folder(folder: Path = HERE) -> tuple[Transformer, Tokenizer]:
    """The model in float32 (from the fp16 file) and its tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = ModelShape(
        name="bundled",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
        ffn=config["intermediate_size"],
        max_context=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        qk_norm=True,
        tied=True,
    )
    weights = load_file(folder / "model.safetensors")
    return Transformer(shape, weights, torch.float32), Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.no_grad()
def greedy(model: Transformer, tokenizer: Tokenizer, prompt: str, tokens: int) -> tuple[str, list[float]]:
    """The greedy continuation of a prompt, at most `tokens` tokens long, and each token's lead in logits."""
    ids, leads = tokenizer.encode(prompt).ids, []
    start, end = len(ids), tokenizer.token_to_id(corpus.END)
    for _ in range(tokens):
        best = forward(model, torch.tensor([ids]))[0, -1].topk(2)
        if best.indices[0] == end:
            break
        ids.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
    return tokenizer.decode(ids[start:]), leads


@torch.no_grad()
def sample(model: Transformer, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """A sampled continuation, with the prompt before it."""
    ids, generator = tokenizer.encode(prompt).ids, torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        probabilities = (forward(model, torch.tensor([ids]))[0, -1] / temperature).softmax(-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        if ids[-1] == tokenizer.token_to_id(corpus.END):
            break
    return tokenizer.decode(ids)


def capitals(model: Transformer, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """How many of the (country, capital) pairs greedy decoding gets right, and the smallest lead inside a right answer.

    Right means: the text after "The capital of X is" is a space, the capital, and then no letter.
    """
    wrong, leads = [], {}
    for country, capital in pairs:
        length = len(tokenizer.encode(f" {capital}").ids)
        text, lead = greedy(model, tokenizer, f"The capital of {country} is", length + 1)
        rest = text.removeprefix(f" {capital}")
        if rest != text and not rest[:1].isalpha():
            leads[country] = min(lead[:length])
        else:
            wrong.append({"country": country, "capital": capital, "said": text})
    smallest = min(leads, key=lambda country: leads[country], default=None)
    return {
        "right": len(leads),
        "of": len(pairs),
        "wrong": wrong,
        "smallest_lead_logits": leads.get(smallest, 0.0) if smallest else 0.0,
        "smallest_lead_country": smallest,
    }


@torch.no_grad()
def play_loss(model: Transformer, tokenizer: Tokenizer, length: int = 4096, windows: int = 5) -> dict[str, Any]:
    """Nats per token of held-out plays, over all positions and by bucket of positions.

    Measured on the first `windows` stretches of `length` tokens of each play.
    """
    losses = []
    for text in corpus.plays()[1].values():
        ids = tokenizer.encode(text).ids
        for at in range(0, len(ids) - length, length)[:windows]:
            window = torch.tensor(ids[at : at + length + 1])
            losses.append(F.cross_entropy(forward(model, window[None, :-1])[0], window[1:], reduction="none"))
    table = torch.stack(losses)  # [windows, length]
    return {
        "windows": len(losses),
        "nats_per_token": float(table.mean()),
        "by_position": {f"{a}-{b - 1}": float(table[:, a:b].mean()) for a, b in BUCKETS if a < length},
    }


@torch.no_grad()
def fact_loss(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Nats per token of short documents, each alone, its end included, its first token not predicted."""
    total, count = 0.0, 0
    documents = sorted((tokenizer.encode(text + corpus.END).ids for text in texts), key=len)
    for at in range(0, len(documents), 64):
        group = documents[at : at + 64]
        rows = torch.full((len(group), max(map(len, group))), -100)  # -100: behind the end, not counted
        for row, ids in zip(rows, group, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        logits = forward(model, rows[:, :-1].clamp(min=0))
        total += float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
        count += int((rows[:, 1:] >= 0).sum())
    return total / count


def evaluate(folder: Path = HERE) -> dict[str, Any]:
    """Every number of the model card, from the files in `folder`, as a dictionary that fits into JSON."""
    model, tokenizer = open_folder(folder)
    everything = [(c.name, c.capital) for c in corpus.countries() if c.capital is not None]
    seen = [text for c in corpus.countries() for group in corpus.sentences(c).values() for text in group][::10]
    return {
        "capitals_50": capitals(model, tokenizer, corpus.well_known()),
        "capitals_all": capitals(model, tokenizer, everything),
        "held_out_plays": play_loss(model, tokenizer),
        "held_out_wordings_nats_per_token": fact_loss(model, tokenizer, corpus.held_out_facts()),
        "trained_wordings_nats_per_token": fact_loss(model, tokenizer, seen),
        "nine_words": [tokenizer.encode(word).tokens for word in corpus.SINGLE_TOKENS],
        "greedy": {prompt: greedy(model, tokenizer, prompt, 40)[0] for prompt in PROMPTS},
        "sampled": [sample(model, tokenizer, prompt, 120, 0.8, seed) for seed, prompt in enumerate(PROMPTS[-2:])],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="measure the bundled model")
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    print(json.dumps(evaluate(parser.parse_args().folder), indent=2, ensure_ascii=False))
