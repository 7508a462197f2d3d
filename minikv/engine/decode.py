"""A whole step in one compiled call: the same forward pass as transformer.py, for the few tokens of a decode step.

A forward pass in torch is some thirty operations a layer. With hundreds of tokens they vanish behind the products; with
one token each takes about as long to be called as to be done, and together they take longer than reading all the
weights. Here a layer is five kernels, each worked on by all threads:

    x  ->  norm, q k v product, bias  ->  q/k norm, rotary, store, attend  ->  out product, added to x
       ->  norm, gate and up product, SiLU  ->  down product, added to x

Who works on what is a matter of tickets (see ``minikv.compiled.threads``), so one thread can do it as well as many, and
``minikv.compiled.sequence`` goes from kernel to kernel. What a kernel reads is written down once a model, as a row of
whole numbers: sizes and addresses. A step fills in how many tokens there are and which blocks hold their past.

Two threads, float32, milliseconds a step, torch's pass -> an earlier form of this one (a call a kernel), 100 tokens
of context: 14 M parameters 5.9 -> 2.7 (1 sequence), 6.8 -> 3.6 (4), 8.3 -> 4.8 (8), 10.4 -> 6.2 (12); the bundled
model 2.4 -> 0.8, 4.1 -> 1.6, 4.1 -> 2.1, 5.2 -> 2.8.

The model does not know; ``transformer.py`` stays the definition, and the tests hold this module against it.
"""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch import Tensor

from minikv.cache.attention import cpu
from minikv.cache.paged import Paged, StepTensors
from minikv.compiled import fused, sequence, threads
from minikv.compiled.product import ALONE_NUMBERS
from minikv.model.transformer import FEW_ROWS, Transformer


class CompiledStep:
    """The compiled forward pass of ``model``, for steps of at most FEW_ROWS tokens on a CPU in float32 or float64.

    The weights' addresses are taken once. Writing to a weight changes no address; a weight that was replaced by another
    tensor is noticed at the next step, and the addresses are taken anew. One thread at a time may use the object.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.weights: list[Tensor] = []
        self.addresses: list[int] = []
        self.usable = False

    def can(self, kv: Paged, step: StepTensors) -> bool:
        """Whether the compiled pass computes this step; if not, call the model."""
        model = self.model
        return (
            len(step.token_ids) <= FEW_ROWS
            and kv.attention is cpu.attend
            and model.dtype == kv.pool.dtype  # float32 or float64, or the attention would not be this one
            and type(model).__call__ is Transformer.__call__  # not when somebody has taught the model something else
            and step.max_context_tokens <= model.shape.max_context  # or the call raises: positions have no angles there
            and kv.pool.is_contiguous()
            and self._current()
        )

    def __call__(self, kv: Paged, step: StepTensors) -> Tensor:
        """K and V into the pool of ``kv``; logits [rows, vocab] of ``step.logit_rows``. ``can`` has said yes."""
        tokens, rows, shape = len(step.token_ids), step.logit_rows, self.model.shape
        x = torch.index_select(self.model.embedding, 0, step.token_ids, out=self.x[:tokens])
        self.products[:, fused.TICKET], self.products[:, fused.DONE], self.products[:, fused.ROWS] = 0, 0, tokens
        pieces = np.zeros((len(step.pieces), 4), np.int64)
        pieces[:, :3] = step.pieces
        self.attentions[:, 0], self.attentions[:, 23] = 0, step.positions.data_ptr()
        self.attentions[:, cpu.STEP] = cpu.step_arguments(step, kv.pool, pieces)
        self.attentions[:, cpu.DONE] = 0
        self.kernels[1 : 5 * shape.layers : 5, sequence.TICKETS] = len(pieces) * shape.kv_heads
        logits = x.new_empty(len(rows), shape.vocab)
        head = self.products[-1]
        head[fused.ROWS], head[fused.PICKED], head[fused.OUT] = len(rows), rows.data_ptr(), logits.data_ptr()
        self.arguments[0] = len(self.kernels) if len(rows) else len(self.kernels) - 1
        alone = self.largest < ALONE_NUMBERS and cpu.is_small(kv.pool, pieces)
        threads.run(self.sequence, self.arguments.ctypes.data, 1 if alone else torch.get_num_threads())
        return logits

    def _current(self) -> bool:
        """Take the addresses anew if a tensor is not the one it was. False when they cannot be used as they are."""
        model = self.model
        weights = [model.embedding, model.norm, model.head, model.cos, model.sin]
        for layer in model.layers:
            weights += (layer.attention_norm, layer.qkv, layer.out, layer.ffn_norm, layer.gate_up, layer.down)
            if layer.qkv_bias is not None:
                weights.append(layer.qkv_bias)
            if layer.qk_norm is not None:
                weights.append(layer.qk_norm)
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self.addresses or not all(map(operator.is_, weights, self.weights)):
            self.weights, self.addresses = weights, addresses
            self.usable = all(w.is_contiguous() and w.is_cpu and w.dtype == model.dtype for w in weights) and self._sizes_fit()
            if self.usable:
                self._write_down()
        return self.usable

    def _sizes_fit(self) -> bool:
        """What is read without a look at sizes must have them."""
        model, shape = self.model, self.model.shape
        hidden, ffn, inner = shape.hidden, shape.ffn, shape.heads * shape.head_dim
        fused_heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return (
            len(model.layers) == shape.layers
            and model.embedding.shape == model.head.shape == (shape.vocab, hidden)
            and model.norm.shape == (hidden,)
            and model.cos.shape == model.sin.shape == (shape.max_context, 1, shape.head_dim)
            and all(
                layer.attention_norm.shape == layer.ffn_norm.shape == (hidden,)
                and layer.qkv.shape == (fused_heads, hidden)
                and (layer.qkv_bias is None or layer.qkv_bias.shape == (fused_heads,))
                and (layer.qk_norm is None or layer.qk_norm.shape == (shape.heads + shape.kv_heads, shape.head_dim))
                and layer.out.shape == (hidden, inner)
                and layer.gate_up.shape == (2 * ffn, hidden)
                and layer.down.shape == (hidden, ffn)
                for layer in model.layers
            )
        )

    def _write_down(self) -> None:
        """A row of arguments for every kernel of a step, and where its results go."""
        model, shape = self.model, self.model.shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        inner = shape.heads * shape.head_dim
        self.x, self.qkv, self.attended, self.gated = (
            torch.empty(FEW_ROWS, size, dtype=model.dtype) for size in (shape.hidden, width, inner, shape.ffn)
        )
        self.eps = torch.tensor([shape.norm_eps], dtype=model.dtype)
        self.products = np.zeros((4 * shape.layers + 1, fused.FIELDS), np.int64)
        self.attentions = np.zeros((shape.layers, cpu.FIELDS), np.int64)
        hidden_kernel, inner_kernel, ffn_kernel = (fused.fused_product(model.dtype, inputs) for inputs in (shape.hidden, inner, shape.ffn))
        attention_kernel = cpu.kernel(model.dtype, shape.head_dim)
        q, k, v = self.qkv.split([heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)], dim=1)

        def product(
            row: np.ndarray, x: Tensor, weight: Tensor, out: Tensor | None, norm: Tensor | None = None, bias: Tensor | None = None,
            gated: int = 0, adds: int = 0,
        ) -> tuple[int, int, int]:  # fmt: skip
            row[:] = (
                0, x.data_ptr(), 0, weight.shape[1], _address(norm), self.eps.data_ptr(), weight.data_ptr(), _address(bias),
                _address(out), weight.shape[0] // (1 + gated), gated, adds, 0, 0,
            )  # fmt: skip
            address, tickets = row.ctypes.data, -(-int(row[fused.OUTPUTS]) // fused.OUTPUTS_A_TICKET)
            return address, address + 8 * fused.DONE, tickets

        kernels: list[tuple[int, ...]] = []  # rows of ``minikv.compiled.sequence``
        for i, layer in enumerate(model.layers):
            qkv, out, gate_up, down = self.products[4 * i : 4 * i + 4]
            attention = self.attentions[i]
            attention[:10] = (
                0, q.data_ptr(), k.data_ptr(), v.data_ptr(), self.attended.data_ptr(), width, width, width, shape.heads, i,
            )  # fmt: skip
            attention[24:28] = (model.cos.data_ptr(), model.sin.data_ptr(), _address(layer.qk_norm), self.eps.data_ptr())
            kernels += [
                (hidden_kernel, *product(qkv, self.x, layer.qkv, self.qkv, norm=layer.attention_norm, bias=layer.qkv_bias)),
                (attention_kernel, attention.ctypes.data, attention.ctypes.data + 8 * cpu.DONE, 0),
                (inner_kernel, *product(out, self.attended, layer.out, self.x, adds=1)),
                (hidden_kernel, *product(gate_up, self.x, layer.gate_up, self.gated, norm=layer.ffn_norm, gated=1)),
                (ffn_kernel, *product(down, self.gated, layer.down, self.x, adds=1)),
            ]
        kernels.append((hidden_kernel, *product(self.products[-1], self.x, model.head, None, norm=model.norm)))
        self.kernels = np.array(kernels, np.int64)
        self.arguments = np.array((len(kernels), self.kernels.ctypes.data), np.int64)
        self.sequence = sequence.sequence()
        self.largest = max(weight.numel() for weight in (model.head, model.layers[0].qkv, model.layers[0].gate_up))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
