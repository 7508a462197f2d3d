"""What a model looks like from outside, and what one of its tokens weighs in the KV cache.

A transformer keeps, for every token and in every layer, one key and one value per *KV head*. So a token weighs

    2 (K and V)  x  layers  x  kv_heads  x  head_dim  x  bytes per number

and nothing else about the model matters to the cache: neither its hidden size nor the number of its query heads.
Four designs differ only in that product. MHA (multi-head attention) has as many KV heads as query heads, MQA has one,
GQA something in between, and MLA stores one compressed vector for all heads, K and V together. This module is plain
arithmetic and imports no torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# int4: 32 numbers of 4 bits share one 2-byte scale.
BYTES_PER_NUMBER = {
    "float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0,
    "int4": 0.5 + 2 / 32,
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer, as its config.json gives them.

    ``heads`` x ``head_dim`` need not be ``hidden`` (in Qwen3-0.6B and 4B it is not). ``mla_latent`` is the number of
    values that multi-head latent attention stores for a token and layer (K and V together); None means that K and V
    are stored per head. Raises ValueError when the numbers cannot belong to a model.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int
    max_context: int = 4096
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = True
    mla_latent: int | None = None
    name: str = "unnamed"

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "ffn", "max_context"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**40:
                raise ValueError(f"{self.name}: {field} must be a whole number of at least 1 (and below 2**40), not {value!r}")
        for field in ("rope_theta", "norm_eps"):
            value = getattr(self, field)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e300:
                raise ValueError(f"{self.name}: {field} must be a number above 0, not {value!r}")
        for field in ("qk_norm", "qkv_bias", "tied"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{self.name}: {field} must be True or False, not {getattr(self, field)!r}")
        if self.mla_latent is not None and (not isinstance(self.mla_latent, int) or self.mla_latent < 1):
            raise ValueError(f"{self.name}: mla_latent must be None or a whole number of at least 1, not {self.mla_latent!r}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.heads} query heads cannot be shared out evenly over {self.kv_heads} KV heads; "
                "heads must be a multiple of kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"{self.name}: head_dim is {self.head_dim}, but rotary embedding turns pairs: it must be even")

    @property
    def group(self) -> int:
        """Query heads that share one KV head (1 in MHA)."""
        return self.heads // self.kv_heads

    @property
    def attention(self) -> str:
        """The field's name for how K and V are shared: MLA, MHA, MQA or GQA."""
        if self.mla_latent is not None:
            return "MLA"
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token adds to the cache, over all layers."""
        if self.mla_latent is not None:
            return self.layers * self.mla_latent
        return 2 * self.layers * self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Bytes that one token adds to the cache when each number is stored as ``dtype``."""
        if dtype not in BYTES_PER_NUMBER:
            raise ValueError(f"unknown KV dtype {dtype!r}; known are {', '.join(BYTES_PER_NUMBER)}")
        return math.ceil(self.kv_numbers_per_token * BYTES_PER_NUMBER[dtype])

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: the four attention projections, the three of SwiGLU, the norms and biases.

        Counts a dense layer whose K and V are stored per head; MLA and mixture-of-experts layers are built
        differently, so a shape with ``mla_latent`` raises ValueError.
        """
        if self.mla_latent is not None:
            raise ValueError(f"{self.name}: the weights of MLA and mixture-of-experts layers are not counted here")
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (2 * queries + 2 * keys) + 3 * self.hidden * self.ffn
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = queries + 2 * keys if self.qkv_bias else 0
        return matrices + norms + biases

    @property
    def parameters(self) -> int:
        """All weights: embedding, layers, the last norm and, unless tied to the embedding, the head."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden


def _qwen3(name: str, layers: int, hidden: int, heads: int, ffn: int, tied: bool) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_dim=128, vocab=151_936, ffn=ffn,
        max_context=40_960, rope_theta=1e6, qk_norm=True, tied=tied,
    )  # fmt: skip


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int, **more) -> ModelShape:  # type: ignore[no-untyped-def]
    more = {"tied": False, "norm_eps": 1e-5, "head_dim": hidden // heads} | more
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab, ffn=ffn, max_context=context, **more
    )


PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32_000, 4096),
        _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128_256, 131_072, rope_theta=5e5),
        _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128_256, 131_072, rope_theta=5e5),
        _llama("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152_064, 32_768, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
        _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 32, 12288, tied=False),
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32_000, 32_768, rope_theta=1e6),
        _llama("smollm2-135m", 30, 576, 9, 3, 1536, 49_152, 8192, rope_theta=1e5, tied=True),
        _llama("gpt-2", 12, 768, 12, 12, 3072, 50_257, 1024, tied=True),
        _llama("deepseek-v3", 61, 7168, 128, 128, 18432, 129_280, 163_840, head_dim=128, mla_latent=512 + 64),
        # The model on which speeds are compared: small enough for a laptop, large enough not to fit its caches.
        ModelShape(name="bench-14m", layers=8, hidden=384, heads=6, kv_heads=2, head_dim=64, vocab=4096, ffn=1024, qk_norm=True),
    )
}


def preset(name: str) -> ModelShape:
    """The shape of a well-known model, by its lower-case name. Raises ValueError that lists the known names."""
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(PRESETS)}") from None


def find_shape(name: str) -> ModelShape:
    """A preset by its name, or the shape in the config.json of a folder (or of a path to the file itself).

    Any Hugging Face config that states its sizes will do, whether minikv can run the model or not. ValueError that
    lists the presets, or says what the file lacks.
    """
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return preset(name)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise ValueError(f"{file} cannot be read as JSON: {wrong}") from None
    return from_config(config, name=path.resolve().name if path.is_dir() else path.stem)


def from_config(config: dict[str, Any], name: str = "unnamed") -> ModelShape:
    """The shape that a Hugging Face config.json describes; only the sizes are read.

    A config with ``kv_lora_rank`` describes multi-head latent attention: what is stored for a token and layer is one vector
    of kv_lora_rank + qk_rope_head_dim numbers. ValueError for a size that is missing or impossible.
    """
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        latent = None if config.get("kv_lora_rank") is None else config["kv_lora_rank"] + config["qk_rope_head_dim"]
        rope = config.get("rope_parameters") or {}
        return ModelShape(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            ffn=config["intermediate_size"],
            max_context=config.get("max_position_embeddings", 4096),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=config.get("model_type") == "qwen3",
            qkv_bias=config.get("model_type") == "qwen2",
            mla_latent=latent,
        )
    except KeyError as missing:
        raise ValueError(f"{name}: config.json has no {missing}") from None
    except (TypeError, AttributeError, ValueError, ZeroDivisionError) as wrong:
        raise ValueError(f"{name}: config.json describes an impossible model: {wrong}") from None
