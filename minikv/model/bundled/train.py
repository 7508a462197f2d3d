"""How the bundled model was made: `python -m minikv.model.bundled.train --out DIR`, forty minutes on two CPU cores.

Training uses the very same transformer that later prefills and decodes: the model asks its `kv` for attention and does
not know that this one keeps nothing and lets gradients through (WholeSequences). The rest is standard. Show the model a
few thousand tokens, half of them facts and half of them Shakespeare; ask at every position for the next token; take the
gradient of the surprise; let AdamW move the weights; do that some thousands of times while the learning rate rises
quickly and then falls along a cosine to zero. Most steps use rows of 256 tokens, which are cheap; in the second half,
one step in sixteen uses rows of 2,048 or 4,096, so that the model has met every position that it claims to handle.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from minikv.model.bundled import corpus
from minikv.model.bundled.evaluate import forward
from minikv.model.transformer import Transformer
from minikv.shape.model_shape import ModelShape

SHAPE = ModelShape(
    name="bundled",
    layers=5,
    hidden=256,
    heads=8,
    kv_heads=2,
    head_dim=32,
    vocab=2048,
    ffn=640,
    max_context=4096,
    qk_norm=True,
)
SEED = 2024
STEPS = 3000
PEAK_RATE, WARMUP_STEPS, WEIGHT_DECAY = 2.5e-3, 100, 0.05


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with SHAPE.vocab entries, learnt from the training text; it can spell any text.

    Raises RuntimeError when a word of the course's example did not become a token of its own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE.vocab,
        special_tokens=[corpus.END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [*corpus.plays()[0].values(), *islice(corpus.fact_documents(SEED), 16_000)]
    tokenizer.train_from_iterator(texts, trainer)
    split = [word for word in corpus.SINGLE_TOKENS if len(tokenizer.encode(word).ids) != 1]
    if split or tokenizer.get_vocab_size() != SHAPE.vocab:
        raise RuntimeError(f"tokenizer: {tokenizer.get_vocab_size()} entries; these words are more than one token: {split}")
    return tokenizer


def initial_weights(seed: int) -> dict[str, Tensor]:
    """Random weights by Hugging Face name: normal, spread 0.02; less for what writes into the sum over layers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, spread: float = 0.02) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * spread

    s, less = SHAPE, 0.02 / math.sqrt(2 * SHAPE.layers)
    weights = {"model.embed_tokens.weight": normal(s.vocab, s.hidden), "model.norm.weight": torch.ones(s.hidden)}
    for i in range(s.layers):
        p = f"model.layers.{i}."
        weights |= {
            p + "input_layernorm.weight": torch.ones(s.hidden),
            p + "self_attn.q_proj.weight": normal(s.heads * s.head_dim, s.hidden),
            p + "self_attn.k_proj.weight": normal(s.kv_heads * s.head_dim, s.hidden),
            p + "self_attn.v_proj.weight": normal(s.kv_heads * s.head_dim, s.hidden),
            p + "self_attn.q_norm.weight": torch.ones(s.head_dim),
            p + "self_attn.k_norm.weight": torch.ones(s.head_dim),
            p + "self_attn.o_proj.weight": normal(s.hidden, s.heads * s.head_dim, less),
            p + "post_attention_layernorm.weight": torch.ones(s.hidden),
            p + "mlp.gate_proj.weight": normal(s.ffn, s.hidden),
            p + "mlp.up_proj.weight": normal(s.ffn, s.hidden),
            p + "mlp.down_proj.weight": normal(s.hidden, s.ffn, less),
        }
    return weights


class Trainable:
    """A Transformer whose tensors take gradients.

    The engine keeps the q and k norm weights repeated once per head (`Layer.qk_norm`), but the model has one q and one
    k weight per layer: those are the parameters here, and `refresh` repeats them before each forward pass.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.qk_norms = [torch.stack((layer.qk_norm[0], layer.qk_norm[-1])) for layer in model.layers if layer.qk_norm is not None]
        self.matrices = [model.embedding]
        self.vectors = [model.norm, *self.qk_norms]
        for layer in model.layers:
            self.matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
            self.vectors += [layer.attention_norm, layer.ffn_norm]
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    @property
    def parameters(self) -> list[Tensor]:
        """Everything that is learnt."""
        return self.matrices + self.vectors

    def refresh(self) -> None:
        """Spread the q and k norm weights [2, head_dim] over the heads [heads + kv_heads, head_dim]."""
        per_head = torch.tensor([0] * SHAPE.heads + [1] * SHAPE.kv_heads)
        for layer, weight in zip(self.model.layers, self.qk_norms, strict=True):
            layer.qk_norm = weight[per_head]

    def loss(self, rows: Tensor) -> Tensor:
        """Mean surprise in nats per token; rows [batch, length + 1] (int64)."""
        self.refresh()
        logits = forward(self.model, rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def fact_rows(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Endless token ids of fact documents, each with the end token behind it."""
    documents = corpus.fact_documents(seed)
    while True:
        for encoding in tokenizer.encode_batch([text + corpus.END for text in islice(documents, 512)]):
            yield encoding.ids


class Rows:
    """Draws training rows: half facts, half Shakespeare. A row begins where a document or a speech begins."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.random = random.Random(seed)
        self.facts = fact_rows(tokenizer, seed)
        self.plays = [tokenizer.encode(text + corpus.END).ids for text in corpus.plays()[0].values()]
        self.play_tokens = sum(map(len, self.plays))
        newline = tokenizer.encode("\n").ids[0]
        self.starts = [
            (number, at) for number, ids in enumerate(self.plays) for at in range(2, len(ids)) if ids[at - 1] == ids[at - 2] == newline
        ] + [(number, 0) for number in range(len(self.plays))]

    def draw(self, rows: int, length: int) -> Tensor:
        """[rows, length + 1] (int64): facts and plays in turn."""
        return torch.tensor([self._fact(length) if i % 2 == 0 else self._play(length) for i in range(rows)])

    def _fact(self, length: int) -> list[int]:
        ids: list[int] = []
        while len(ids) <= length:
            ids += next(self.facts)
        return ids[: length + 1]

    def _play(self, length: int) -> list[int]:
        while True:
            number, at = self.random.choice(self.starts)
            if at + length < len(self.plays[number]):
                return self.plays[number][at : at + length + 1]


def batch_size(step: int, progress: float) -> tuple[int, int]:
    """(rows, tokens in a row) of a step: short rows, and, after 60 % of the training, now and then, long ones."""
    if progress > 0.6 and step % 64 == 63:
        return 2, 4096
    if progress > 0.6 and step % 16 == 15:
        return 2, 2048
    return 8, 256


def learning_rate(step: int, progress: float) -> float:
    """Up in a straight line for WARMUP_STEPS, then down along a cosine; progress 0 to 1."""
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def save(model: Transformer, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder that minikv and Hugging Face transformers open: weights in fp16 and three JSON files."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.float16).contiguous().clone() for name, weight in model.named_weights()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    end, s = tokenizer.token_to_id(corpus.END), SHAPE
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": s.layers,
        "hidden_size": s.hidden,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.ffn,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.max_context,
        "rope_theta": s.rope_theta,
        "rms_norm_eps": s.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": s.tied,
        "use_sliding_window": False,
        "torch_dtype": "float16",
        "bos_token_id": None,
        "eos_token_id": end,
    }
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": corpus.END,
        "pad_token": corpus.END,
        "model_max_length": s.max_context,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"eos_token_id": end, "pad_token_id": end, "do_sample": False}
    for name, content in (("config", config), ("tokenizer_config", special), ("generation_config", generation)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def train(out: Path, steps: int = STEPS, minutes: float = math.inf) -> dict[str, Any]:
    """Train from scratch and write everything to `out`; returns the log (also in out/training_log.json).

    The schedule follows the steps done or the minutes gone, whichever are further along; without `minutes` nothing
    depends on the clock. (The last bits of the sums still depend on how many threads the machine's load allows.) A
    usable model is written every five minutes.
    """
    tokenizer = train_tokenizer()
    rows = Rows(tokenizer, SEED)
    trainable = Trainable(Transformer(SHAPE, initial_weights(SEED)))
    optimizer = torch.optim.AdamW(
        [
            {"params": trainable.matrices, "weight_decay": WEIGHT_DECAY},
            {"params": trainable.vectors, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.97),
        fused=True,
    )
    log: dict[str, Any] = {
        "seed": SEED,
        "planned_steps": steps,
        "play_tokens_in_training_text": rows.play_tokens,
        "curve": [],
    }
    started = saved = time.perf_counter()
    step = tokens = 0
    recent: list[float] = []
    while True:
        elapsed_minutes = (time.perf_counter() - started) / 60
        progress = max(step / steps, elapsed_minutes / minutes)
        if progress >= 1:
            break
        batch, length = batch_size(step, progress)
        torch.set_num_threads(1 if os.getloadavg()[0] > 3 else 2)  # on a busy machine, two would wait for each other
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        loss = trainable.loss(rows.draw(batch, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(float(loss.detach()))
        step, tokens = step + 1, tokens + batch * length
        if step % 25 == 0:
            point = {
                "step": step,
                "tokens": tokens,
                "minutes": round(elapsed_minutes, 2),
                "threads": torch.get_num_threads(),
            }
            log["curve"].append(point | {"loss": round(sum(recent) / len(recent), 4)})
            recent = []
            print(log["curve"][-1], flush=True)
        if time.perf_counter() - saved > 300:
            trainable.refresh()
            save(trainable.model, tokenizer, out)
            saved = time.perf_counter()
    trainable.refresh()
    save(trainable.model, tokenizer, out)
    log |= {"steps": step, "tokens": tokens, "minutes": round((time.perf_counter() - started) / 60, 1)}
    log |= {"parameters": SHAPE.parameters}
    (out / "training_log.json").write_text(json.dumps(log).replace('{"step"', '\n{"step"') + "\n", encoding="utf-8")
    return log


def plot(log: dict[str, Any], path: Path) -> None:
    """Draw the loss curve of a training log as a small PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot([p["tokens"] / 1e6 for p in log["curve"]], [p["loss"] for p in log["curve"]], color="black", linewidth=1)
    axes.set(xlabel="tokens trained on (millions)", ylabel="loss (nats per token)", ylim=(0, 5), xlim=(0, None))
    axes.set_title("Half facts, half Shakespeare: mean loss of every 25 steps", fontsize=10)
    axes.grid(color="0.85", linewidth=0.5)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train the bundled model from scratch")
    parser.add_argument("--out", type=Path, default=Path("bundled_model"), help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop at this time at the latest")
    arguments = parser.parse_args()
    plot(train(arguments.out, arguments.steps, arguments.minutes), arguments.out / "loss.png")
