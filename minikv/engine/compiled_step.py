"""A whole step in one compiled call: the same forward pass as transformer.py, for decode steps and chunks of prompts.

A forward pass in torch is some thirty operations a layer. With one token each takes about as long to be called as to be
done, and together they take longer than reading all the weights; with hundreds, what each writes to memory the next one
must fetch again. Here a layer is five kernels, each worked on by all threads:

    x  ->  norm, q k v product, bias, q/k norm, rotation, K and V into their slots  ->  attend  ->  out product, added to x
       ->  norm, gate and up product, SiLU  ->  down product, added to x

Who works on what is a matter of tickets (see ``minikv.compiled.threads``), so one thread can do it as well as many, and
``minikv.compiled.sequence`` goes from kernel to kernel. What a kernel reads is written down once a model, as a row of
whole numbers: sizes and addresses. A step fills in how many tokens there are and which blocks hold their past.

The model does not know; ``transformer.py`` stays the definition, and the tests hold this module against it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minikv.cache.attention import cpu, cpu_project
from minikv.cache.paged import Paged, StepTensors
from minikv.compiled import fused, sequence, threads
from minikv.compiled.product import ALONE_NUMBERS
from minikv.model.transformer import Transformer

KERNELS_A_LAYER = 5
# What says of a weight that it is the one whose address was taken.
_QUESTIONS: tuple[Callable[[Tensor], object], ...] = (Tensor.data_ptr, Tensor.size, Tensor.is_contiguous, operator.attrgetter("dtype"))


class CompiledStep:
    """The compiled forward pass of ``model``, on a CPU in float32 or float64.

    The weights' addresses are taken once. Writing to a weight changes no address; a weight that was replaced by another
    tensor, or lies otherwise in memory, is noticed at the next step, and the addresses are taken anew. One thread at a time
    may use the object, always under ``torch.inference_mode``.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.weights: list[Tensor] = []
        self.seen: list[object] = []
        self.usable = False
        self.room = 0  # tokens

    def can(self, kv: Paged, step: StepTensors) -> bool:
        """Whether the compiled pass computes this step; if not, call the model."""
        model, shape = self.model, self.model.shape
        return (
            kv.attention is cpu.attend
            and model.dtype == kv.pool.dtype  # float32 or float64, or the attention would not be this one
            and not _taught_otherwise(model, Transformer, ("__call__", "_project", "_norm"))
            and not _taught_otherwise(kv, Paged, ("attend",))
            and step.max_context_tokens <= shape.max_context  # or the call raises: positions have no angles there
            and kv.pool.is_contiguous()
            and kv.pool.shape[1:4] == (shape.layers, 2, shape.kv_heads)
            and kv.pool.shape[5] == shape.head_dim
            and self._current()
        )

    def __call__(self, kv: Paged, step: StepTensors) -> Tensor:
        """K and V into the pool of ``kv``; logits [rows, vocab] of ``step.logit_rows``. ``can`` has said yes."""
        tokens, rows, shape = step.num_tokens, step.num_rows, self.model.shape
        if tokens > self.room:
            self._make_room(tokens)
        torch.index_select(self.model.embedding, 0, step.token_ids, out=self.x[:tokens])
        tiles = cpu.tiles_of(step.pieces, shape.group)
        attention = cpu.step_arguments(step, kv.pool, tiles)
        self.products[:, :3] = self.projections[:, :3] = (0, 0, tokens)  # no tickets taken, none done
        self.projections[:, cpu_project.POSITIONS :] = (
            step.address("positions"), step.address("slots"), attention[0], attention[1], kv.block_size,
        )  # fmt: skip
        self.attentions[:, : cpu.Q], self.attentions[:, cpu.STEP] = 0, attention
        if (tokens, rows, len(tiles)) != self.counted:
            self._count_tickets(tokens, rows, len(tiles))
        logits = self.x.new_empty(rows, shape.vocab)
        head = self.products[-1]
        head[fused.ROWS], head[fused.PICKED], head[fused.OUT] = rows, step.address("logit_rows"), logits.data_ptr()
        alone = tokens * self.most_numbers < ALONE_NUMBERS and cpu.is_small(kv.pool, tiles)
        threads.run(self.sequence, self.arguments_at, 1 if alone else torch.get_num_threads())
        return logits

    def _count_tickets(self, tokens: int, rows: int, tiles: int) -> None:
        """How many tickets each kernel has, and without rows nothing for the last one to do."""
        shape = self.model.shape
        a_layer = (
            cpu_project.tickets(tokens, shape.heads + 2 * shape.kv_heads),
            tiles * shape.kv_heads,
            fused.tickets(tokens, shape.hidden),
            fused.tickets(tokens, shape.ffn),
            fused.tickets(tokens, shape.hidden),
        )
        self.kernels[:-1, sequence.TICKETS].reshape(shape.layers, KERNELS_A_LAYER)[:] = a_layer
        self.kernels[-1, sequence.TICKETS] = fused.tickets(rows, shape.vocab)
        self.arguments[0] = len(self.kernels) if rows else len(self.kernels) - 1
        self.counted = (tokens, rows, tiles)

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
        # Asked for without a line of Python a weight: this is done at every step.
        seen: list[object] = [model.shape]
        for ask in _QUESTIONS:
            seen += map(ask, weights)
        if seen != self.seen:
            self.usable, self.seen = False, []  # whoever is interrupted in the middle begins anew
            if all(w.is_contiguous() and w.is_cpu and w.dtype == model.dtype for w in weights) and self._sizes_fit():
                self._write_down()
                self.usable = True
            self.weights, self.seen = weights, seen  # the weights, so that what replaces one cannot come to lie where it lay
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
        """A row of arguments for every kernel of a step; where its results go is for ``_make_room`` to say."""
        model, shape = self.model, self.model.shape
        self.room = 0
        self.eps = torch.tensor([shape.norm_eps], dtype=model.dtype)
        self.products = np.zeros((3 * shape.layers + 1, fused.FIELDS), np.int64)
        self.projections = np.zeros((shape.layers, cpu_project.FIELDS), np.int64)
        self.attentions = np.zeros((shape.layers, cpu.FIELDS), np.int64)
        inner = shape.heads * shape.head_dim
        hidden_kernel, inner_kernel, ffn_kernel = (fused.fused_product(model.dtype, inputs) for inputs in (shape.hidden, inner, shape.ffn))
        projection_kernel = cpu_project.projection(model.dtype, shape.hidden, shape.head_dim)
        attention_kernel = cpu.kernel(model.dtype, shape.head_dim)

        def product(
            row: np.ndarray, weight: Tensor, norm: Tensor | None = None, bias: Tensor | None = None, gated: int = 0, adds: int = 0
        ) -> tuple[int, int, int]:
            """Fill in a row; where it lies, where its count of finished tickets lies, and 0 for their number."""
            row[fused.OUTPUTS], row[fused.INPUTS] = weight.shape[0] // (1 + gated), weight.shape[1]
            row[fused.GATED], row[fused.ADDS] = gated, adds
            row[fused.NORM], row[fused.EPS], row[fused.WEIGHT], row[fused.BIAS] = map(_address, (norm, self.eps, weight, bias))
            return row.ctypes.data, row.ctypes.data + 8 * fused.DONE, 0

        kernels: list[tuple[int, ...]] = []  # rows of ``minikv.compiled.sequence``
        for i, layer in enumerate(model.layers):
            out, gate_up, down = self.products[3 * i : 3 * i + 3]
            projection, attention = self.projections[i], self.attentions[i]
            projection[fused.FIELDS :] = (
                shape.heads, shape.kv_heads, shape.head_dim, _address(model.cos), _address(model.sin), _address(layer.qk_norm),
                i, shape.layers, 0, 0, 0, 0, 0,
            )  # fmt: skip
            attention[: cpu.POOL] = (0, 0, 0, inner, 0, shape.heads, i)
            kernels += [
                (projection_kernel, *product(projection, layer.qkv, norm=layer.attention_norm, bias=layer.qkv_bias)),
                (attention_kernel, attention.ctypes.data, attention.ctypes.data + 8 * cpu.DONE, 0),
                (inner_kernel, *product(out, layer.out, adds=1)),
                (hidden_kernel, *product(gate_up, layer.gate_up, norm=layer.ffn_norm, gated=1)),
                (ffn_kernel, *product(down, layer.down, adds=1)),
            ]
        kernels.append((hidden_kernel, *product(self.products[-1], model.head, norm=model.norm)))
        self.kernels = np.array(kernels, np.int64)
        self.arguments = np.array((len(kernels), self.kernels.ctypes.data), np.int64)
        self.arguments_at = self.arguments.ctypes.data
        self.counted = (0, 0, 0)
        self.sequence = sequence.sequence()
        self.most_numbers = max(weight.numel() for weight in (model.head, model.layers[0].qkv, model.layers[0].gate_up))

    def _make_room(self, tokens: int) -> None:
        """Where the kernels hand each other their results, for steps of up to ``tokens`` tokens."""
        model, shape = self.model, self.model.shape
        self.room = 0  # until all is done: the kernels' arguments point to what is let go here
        inner = shape.heads * shape.head_dim
        sizes = (shape.hidden, inner, inner, shape.ffn)
        self.x, self.q, self.attended, self.gated = (torch.empty(tokens, size, dtype=model.dtype) for size in sizes)
        x, q, attended, gated = map(_address, (self.x, self.q, self.attended, self.gated))
        self.projections[:, fused.X], self.projections[:, fused.OUT] = x, q
        self.attentions[:, cpu.Q], self.attentions[:, cpu.OUT] = q, attended
        self.products[0:-1:3, fused.X], self.products[0:-1:3, fused.OUT] = attended, x
        self.products[1:-1:3, fused.X], self.products[1:-1:3, fused.OUT] = x, gated
        self.products[2:-1:3, fused.X], self.products[2:-1:3, fused.OUT] = gated, x
        self.products[-1, fused.X] = x
        self.room = tokens


def _taught_otherwise(thing: object, original: type, names: tuple[str, ...]) -> bool:
    """Whether somebody has put something else in the place of one of the methods, in a class of their own or in the object."""
    return any(name in vars(thing) or getattr(type(thing), name) is not getattr(original, name) for name in names)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
