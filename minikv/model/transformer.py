"""One forward pass of a decoder-only transformer; it knows no cache.

Text goes in as token ids, and out come logits: one score per vocabulary entry for what comes next. In between, every
layer does two things. Attention lets a token look at the tokens before it; the feed-forward network (SwiGLU) then
works on each token alone. Both read a normalised copy of the running sum ``x`` (RMSNorm) and add their answer to it.

Where K and V of earlier tokens come from is not decided here. The model asks one thing of a cache,

    out = kv.attend(layer, q, k, v)

which stores the new k and v and returns what attention gives for q. Recompute everything, one buffer per sequence or
pages: the model does not change, because it never knows. The same code trains, prefills and decodes.

Sequences are packed: the tokens of all sequences of a step lie behind each other in one dimension, so there is no
padding and no batch dimension. Families: Llama, Mistral (without a window), Qwen2 (bias on q, k, v), Qwen3 (q and k
normalised per head).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.shape.model_shape import ModelShape

FEW_ROWS = 64


class KeyValueStore(Protocol):
    """All that the model asks of a cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v of this step's tokens and return attention for q, each token seeing itself and what is before it.

        q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; q and k already rotated. Returns
        [tokens, heads, head_dim]. Which token belongs to which sequence was said before the forward pass.
        """
        ...


@dataclass
class Layer:
    """One layer's weights. Projections that read the same input are fused: one product instead of three or two."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 kv_heads) head_dim, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 kv_heads) head_dim]
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: one q weight per head, one k weight: copies, for one product
    out: Tensor  # [hidden, heads head_dim]
    ffn_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 ffn, hidden]
    down: Tensor  # [hidden, ffn]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; x [rows, inputs], weight [outputs, inputs], bias [outputs]. Returns [rows, outputs].

    The same product whichever way it is asked for, but with few rows on a CPU not equally fast: up to FEW_ROWS rows, a
    compiled loop reads the weights once, on all cores. The 33 products of a model of 14 M parameters, two threads, in ms,
    medians of one run:

        rows             1     2     4     8    16    32    64
        x @ weight.T   5.3   8.3  10.2   8.5   9.9  12.7  19.1
        compiled       2.8   3.4   3.3   3.9   4.8   7.7  13.5

    More rows are left to torch: the gain shrinks, and its FLOP counter sees them.
    """
    plain = x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1] and weight.is_contiguous() and x.is_cpu and weight.is_cpu
    plain = plain and weight.dtype == x.dtype and x.dtype in (torch.float32, torch.float64)
    trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not plain or trained or not 0 < x.shape[0] <= FEW_ROWS:
        return F.linear(x, weight, bias)
    from minikv.compiled.product import few_rows  # not above: on a GPU nothing is compiled by Numba

    out = few_rows(x, weight)
    return out if bias is None else out + bias


class Transformer:
    """The weights of a model and its forward pass.

    ``weights`` maps Hugging Face names (``model.layers.0.self_attn.q_proj.weight``, ...) to tensors of any float
    dtype; they are fused, cast and moved once. Norms and rotary angles are computed in ``dtype`` but never in less
    than float32.
    """

    def __init__(
        self, shape: ModelShape, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.norm_dtype = torch.promote_types(dtype, torch.float32)

        def take(*names: str, dtype: torch.dtype = dtype) -> Tensor:
            parts = [weights[name].to(device=self.device, dtype=dtype) for name in names]
            return torch.cat(parts) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

        self.embedding = take("model.embed_tokens.weight")  # [vocab, hidden]
        self.norm = take("model.norm.weight", dtype=self.norm_dtype)  # [hidden]
        self.head = self.embedding if shape.tied else take("lm_head.weight")  # [vocab, hidden]
        self.layers = [self._take_layer(f"model.layers.{i}.", take) for i in range(shape.layers)]
        self.cos, self.sin = self._rotary_table()
        self._fingerprint: str | None = None

    def _take_layer(self, prefix: str, take) -> Layer:  # type: ignore[no-untyped-def]
        shape, attention = self.shape, prefix + "self_attn."
        qk_norm = None
        if shape.qk_norm:
            q, k = (take(attention + f"{name}_norm.weight", dtype=self.norm_dtype) for name in "qk")
            qk_norm = torch.cat((q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)))
        return Layer(
            attention_norm=take(prefix + "input_layernorm.weight", dtype=self.norm_dtype),
            qkv=take(*(attention + f"{name}_proj.weight" for name in "qkv")),
            qkv_bias=take(*(attention + f"{name}_proj.bias" for name in "qkv")) if shape.qkv_bias else None,
            qk_norm=qk_norm,
            out=take(attention + "o_proj.weight"),
            ffn_norm=take(prefix + "post_attention_layernorm.weight", dtype=self.norm_dtype),
            gate_up=take(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"),
            down=take(prefix + "mlp.down_proj.weight"),
        )

    def _rotary_table(self) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every position: [max_context, 1, head_dim] each, angles taken in float64."""
        half = self.shape.head_dim // 2
        speed = float(self.shape.rope_theta) ** -(torch.arange(half, dtype=torch.float64) / half)  # radians per position
        angle = torch.arange(self.shape.max_context, dtype=torch.float64)[:, None] * speed
        cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
        return tuple(t[:, None].to(device=self.device, dtype=self.norm_dtype) for t in (cos, sin))  # type: ignore[return-value]

    def __call__(self, token_ids: Tensor, positions: Tensor, kv: KeyValueStore, rows: Tensor | None = None) -> Tensor:
        """Logits for the packed tokens of one step.

        token_ids, positions [tokens] (int64); ``rows`` [n] picks the tokens whose logits are wanted (default: all).
        Returns [tokens or n, vocab] in the model's dtype.
        """
        cos, sin = self.cos[positions], self.sin[positions]  # [tokens, 1, head_dim]
        x = self.embedding[token_ids]  # [tokens, hidden]
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(layer, self._norm(x, layer.attention_norm), cos, sin)
            x = x + linear(kv.attend(i, q, k, v).flatten(1), layer.out)
            gate, up = linear(self._norm(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)  # [tokens, ffn] each
            x = x + linear(F.silu(gate) * up, layer.down)
        if rows is not None:
            x = x[rows]
        return linear(self._norm(x, self.norm), self.head).contiguous()

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]; q and k rotated by their positions."""
        shape = self.shape
        qkv = linear(x, layer.qkv, layer.qkv_bias).contiguous().unflatten(-1, (-1, shape.head_dim))
        qk, v = qkv.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=1)
        qk = qk.to(self.norm_dtype)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (shape.head_dim,), eps=shape.norm_eps) * layer.qk_norm
        # Rotary: turn (a, b) into (a cos - b sin, b cos + a sin); rolling by half swaps a and b, sin carries the sign.
        qk = torch.addcmul(qk * cos, qk.roll(shape.head_dim // 2, -1), sin).to(self.dtype)
        q, k = qk.split((shape.heads, shape.kv_heads), dim=1)
        return q, k, v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.norm_dtype), weight.shape, weight, self.shape.norm_eps).to(self.dtype)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, as views of the fused tensors (no copies)."""
        shape = self.shape
        sizes = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
        yield "model.embed_tokens.weight", self.embedding
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            yield prefix + "input_layernorm.weight", layer.attention_norm
            for name, part in zip("qkv", layer.qkv.split(sizes), strict=True):
                yield prefix + f"self_attn.{name}_proj.weight", part
            if layer.qkv_bias is not None:
                for name, part in zip("qkv", layer.qkv_bias.split(sizes), strict=True):
                    yield prefix + f"self_attn.{name}_proj.bias", part
            if layer.qk_norm is not None:
                yield prefix + "self_attn.q_norm.weight", layer.qk_norm[0]
                yield prefix + "self_attn.k_norm.weight", layer.qk_norm[-1]
            yield prefix + "self_attn.o_proj.weight", layer.out
            yield prefix + "post_attention_layernorm.weight", layer.ffn_norm
            gate, up = layer.gate_up.chunk(2)
            yield prefix + "mlp.gate_proj.weight", gate
            yield prefix + "mlp.up_proj.weight", up
            yield prefix + "mlp.down_proj.weight", layer.down
        yield "model.norm.weight", self.norm
        if not shape.tied:
            yield "lm_head.weight", self.head

    @property
    def fingerprint(self) -> str:
        """sha256 over shape, dtype and every weight: what a cached K or V depends on besides the tokens.

        Computed at the first use and kept; call ``weights_changed`` after writing to a weight.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{self.shape}{self.dtype}".encode())
            for name, weight in self.named_weights():
                digest.update(name.encode())
                digest.update(weight.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def weights_changed(self) -> None:
        """Forget the fingerprint, so that KV computed with the old weights is not taken for that of the new ones."""
        self._fingerprint = None
