"""A whole step in one compiled call: the same forward pass as transformer.py, for decode steps and chunks of prompts.

A forward pass in torch is some thirty operations a layer. With one token each takes about as long to be called as to be
done, and together they take longer than reading all the weights; with hundreds, what each writes to memory the next one
must fetch again. Here a layer is five kernels, each worked on by all threads:

    x  ->  norm, q k v product, bias, q/k norm, rotation, K and V into their slots  ->  attend  ->  out product, added to x
       ->  norm, gate and up product, SiLU  ->  down product, added to x

In front of the first layer stands the embedding, and behind the last one norm and head, and the best token of each row of logits.
Who works on what is a matter of tickets (see ``minikv.compiled.threads``), so one thread can do it as well as many, and
``minikv.compiled.sequence`` goes from kernel to kernel. What a kernel reads is written down once a model, as a row of
whole numbers: sizes and addresses. A step fills in how many tokens there are and which blocks hold their past.

The model does not know; ``transformer.py`` stays the definition, and the tests hold this module against it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from minikv.cache.attention import cpu, cpu_project
from minikv.cache.paged import Paged, StepTensors
from minikv.compiled import beside, fused, gather, pick, sequence, threads
from minikv.compiled.product import ALONE_NUMBERS
from minikv.model.sampling import Best
from minikv.model.transformer import Transformer

KERNELS_A_LAYER = 5
# What says of a weight that it lies where it lay and is what it was: no matter in which tensor, then the same numbers are read.
_QUESTIONS: tuple[Callable[[Tensor], object], ...] = (Tensor.data_ptr, Tensor.size, Tensor.is_contiguous, operator.attrgetter("dtype"))
# The numbers that every step fills in anew, by their place in ``CompiledStep.__call__``; ATTENTION are those of ``cpu.STEP``.
NOTHING, TOKENS, ROWS, TOKEN_IDS, POSITIONS, SLOTS, PICKED, BLOCK_SIZE, ATTENTION = range(9)


class CompiledStep:
    """The compiled forward pass of ``model``, on a CPU in float32 or float64.

    The weights' addresses are taken once. Writing to a weight changes no address; a weight that was replaced by another
    tensor, or lies otherwise in memory, is noticed at the next step, and the addresses are taken anew. One thread at a time
    may use the object. torch sees nothing of it: no gradients, no inference mode.
    """

    logits: Tensor  # [rows, vocab]
    best: Tensor  # [rows] int64
    logprobs: Tensor  # [rows]
    sums: Tensor  # [rows]

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.seen: list[object] = []
        self.usable = False
        self.room = self.row_room = 0  # tokens, rows of logits

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

    def __call__(self, kv: Paged, step: StepTensors) -> tuple[Tensor, Best]:
        """K and V into the pool of ``kv``; logits [rows, vocab] of ``step.logit_rows``, and the best of each. ``can`` has said yes.

        Both are valid until the next call. A token that the vocabulary does not have (the engine lets none in) gives nan.
        """
        tokens, rows = step.num_tokens, step.num_rows
        if tokens > self.room or rows > self.row_room:
            self._make_room(max(tokens, self.room), max(rows, self.row_room))
        tiles = cpu.tiles_of(step.pieces, self.model.shape.group)
        if (tokens, rows, len(tiles)) != self.counted:
            self._count(tokens, rows, len(tiles))
        numbers = (
            0, tokens, rows, *map(step.address, ("token_ids", "positions", "slots", "logit_rows")), kv.block_size,
            *cpu.step_arguments(step, kv.pool, tiles),
        )  # fmt: skip
        self.numbers[self.places] = np.array(numbers, np.int64)[self.which]
        alone = tokens * self.most_numbers < ALONE_NUMBERS and cpu.is_small(kv.pool, tiles)
        threads.run(self.sequence, self.arguments_at, 1 if alone else torch.get_num_threads())
        return self.results

    def _count(self, tokens: int, rows: int, tiles: int) -> None:
        """How many tickets each kernel has, without rows nothing for the last two to do, and what comes of it.

        It stays as it is while the same sequences decode, and a view of a tensor costs more than one would think.
        """
        self.counted = (0, 0, 0)  # whoever is interrupted in the middle counts again
        shape = self.model.shape
        a_layer = (
            cpu_project.tickets(tokens, shape.heads + 2 * shape.kv_heads),
            tiles * shape.kv_heads,
            fused.tickets(tokens, shape.hidden),
            fused.tickets(tokens, shape.ffn),
            fused.tickets(tokens, shape.hidden),
        )
        self.kernels[0, sequence.TICKETS] = gather.tickets(tokens)
        self.kernels[1:-2, sequence.TICKETS].reshape(shape.layers, KERNELS_A_LAYER)[:] = a_layer
        self.kernels[-2:, sequence.TICKETS] = fused.tickets(rows, shape.vocab), rows
        self.arguments[0] = len(self.kernels) if rows else len(self.kernels) - 2
        self.results = self.logits[:rows], Best(self.best[:rows], self.logprobs[:rows], self.sums[:rows])
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
            self.seen = seen
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
        self.room = self.row_room = 0
        self.eps = torch.tensor([shape.norm_eps], dtype=model.dtype, device="cpu")
        layers = shape.layers
        forms = ((3 * layers + 1, fused.FIELDS), (layers, cpu_project.FIELDS), (layers, cpu.FIELDS), (1, gather.FIELDS), (1, pick.FIELDS))
        self.numbers, (self.products, self.projections, self.attentions, self.gathers, self.picks) = _rows(forms, 0)
        self._say_what_changes(*_rows(forms, -1))
        inner = shape.heads * shape.head_dim
        with beside.compiling(cpu.kernel, model.dtype, shape.head_dim, kept=cpu.kernel_is_kept()):
            hidden_kernel, inner_kernel, ffn_kernel = (fused.fused_product(model.dtype, n) for n in (shape.hidden, inner, shape.ffn))
            projection_kernel = cpu_project.projection(model.dtype, shape.hidden, shape.head_dim)
            gather_kernel, pick_kernel = gather.kernel(model.dtype), pick.kernel(model.dtype)
            self.sequence = sequence.sequence()
        attention_kernel = cpu.kernel(model.dtype, shape.head_dim)

        def product(
            row: np.ndarray, weight: Tensor, norm: Tensor | None = None, bias: Tensor | None = None, gated: int = 0, adds: int = 0
        ) -> tuple[int, int, int]:
            """Fill in a row; where it lies, where its count of finished tickets lies, and 0 for their number."""
            row[fused.OUTPUTS], row[fused.INPUTS] = weight.shape[0] // (1 + gated), weight.shape[1]
            row[fused.GATED], row[fused.ADDS] = gated, adds
            row[fused.NORM], row[fused.EPS], row[fused.WEIGHT], row[fused.BIAS] = map(_address, (norm, self.eps, weight, bias))
            return row.ctypes.data, row.ctypes.data + 8 * fused.DONE, 0

        self.gathers[0, [gather.TABLE, gather.TABLE_ROWS, gather.WIDTH]] = _address(model.embedding), shape.vocab, shape.hidden
        embedding = self.gathers.ctypes.data
        kernels = [(gather_kernel, embedding, embedding + 8 * gather.DONE, 0)]  # rows of ``minikv.compiled.sequence``
        for i, layer in enumerate(model.layers):
            out, gate_up, down = self.products[3 * i : 3 * i + 3]
            projection, attention = self.projections[i], self.attentions[i]
            projection[fused.FIELDS : cpu_project.POSITIONS] = (
                shape.heads, shape.kv_heads, shape.head_dim, _address(model.cos), _address(model.sin), _address(layer.qk_norm), i, layers,
            )  # fmt: skip
            attention[cpu.Q : cpu.POOL] = (0, inner, 0, shape.heads, i)
            kernels += [
                (projection_kernel, *product(projection, layer.qkv, norm=layer.attention_norm, bias=layer.qkv_bias)),
                (attention_kernel, attention.ctypes.data, attention.ctypes.data + 8 * cpu.DONE, 0),
                (inner_kernel, *product(out, layer.out, adds=1)),
                (hidden_kernel, *product(gate_up, layer.gate_up, norm=layer.ffn_norm, gated=1)),
                (ffn_kernel, *product(down, layer.down, adds=1)),
            ]
        kernels.append((hidden_kernel, *product(self.products[-1], model.head, norm=model.norm)))
        self.picks[0, pick.WIDTH] = shape.vocab
        picks = self.picks.ctypes.data
        kernels.append((pick_kernel, picks, picks + 8 * pick.DONE, 0))
        self.kernels = np.array(kernels, np.int64)
        self.arguments = np.array((len(kernels), self.kernels.ctypes.data), np.int64)
        self.arguments_at = self.arguments.ctypes.data
        self.most_numbers = max(weight.numel() for weight in (model.head, model.layers[0].qkv, model.layers[0].gate_up))

    def _say_what_changes(self, which: np.ndarray, parts: list[np.ndarray]) -> None:
        """At ``places`` of ``numbers`` every step writes those of its numbers that ``which`` says."""
        products, projections, attentions, gathers, picks = parts
        for rows in (products, projections):
            rows[:, [fused.TICKET, fused.DONE, fused.ROWS]] = NOTHING, NOTHING, TOKENS
        products[-1, [fused.ROWS, fused.PICKED]] = ROWS, PICKED
        pool, blocks = ATTENTION, ATTENTION + cpu.BLOCKS - cpu.POOL
        projections[:, cpu_project.POSITIONS :] = POSITIONS, SLOTS, pool, blocks, BLOCK_SIZE
        attentions[:, [cpu.TICKET, cpu.DONE]] = NOTHING
        attentions[:, cpu.STEP] = range(ATTENTION, ATTENTION + cpu.FIELDS - cpu.POOL)
        gathers[:, [gather.TICKET, gather.DONE, gather.ROWS, gather.NUMBERS]] = NOTHING, NOTHING, TOKENS, TOKEN_IDS
        picks[:, [pick.TICKET, pick.DONE, pick.ROWS]] = NOTHING, NOTHING, ROWS
        self.places = np.flatnonzero(which >= 0)
        self.which = which[self.places]

    def _make_room(self, tokens: int, rows: int) -> None:
        """Where the kernels leave their results, for steps of up to ``tokens`` tokens and ``rows`` rows of logits."""
        shape = self.model.shape
        self.room, self.row_room, self.counted = 0, 0, (0, 0, 0)  # until all is done: the kernels' arguments point to what is let go here
        inner = shape.heads * shape.head_dim
        sizes = (shape.hidden, inner, inner, shape.ffn)
        self.x, self.q, self.attended, self.gated = (self._empty(tokens, size) for size in sizes)
        self.logits, self.logprobs, self.sums = self._empty(rows, shape.vocab), self._empty(rows), self._empty(rows)
        self.best = self._empty(rows, dtype=torch.int64)
        x, q, attended, gated, logits = map(_address, (self.x, self.q, self.attended, self.gated, self.logits))
        self.projections[:, fused.X], self.projections[:, fused.OUT] = x, q
        self.attentions[:, cpu.Q], self.attentions[:, cpu.OUT] = q, attended
        self.products[0:-1:3, fused.X], self.products[0:-1:3, fused.OUT] = attended, x
        self.products[1:-1:3, fused.X], self.products[1:-1:3, fused.OUT] = x, gated
        self.products[2:-1:3, fused.X], self.products[2:-1:3, fused.OUT] = gated, x
        self.products[-1, fused.X], self.products[-1, fused.OUT] = x, logits
        self.picks[0, [pick.LOGITS, pick.TOKENS, pick.LOGPROBS, pick.SUMS]] = logits, *map(_address, (self.best, self.logprobs, self.sums))
        self.gathers[0, gather.OUT] = x
        self.room, self.row_room = tokens, rows

    def _empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room on the CPU, whatever torch's default device is: the kernels write to its address."""
        return torch.empty(sizes, dtype=self.model.dtype if dtype is None else dtype, device="cpu")


def _rows(forms: Sequence[tuple[int, int]], value: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """An array full of ``value``, and its parts, each of so many rows and columns."""
    ends = list(accumulate(rows * columns for rows, columns in forms))
    whole = np.full(ends[-1], value, np.int64)
    return whole, [part.reshape(form) for part, form in zip(np.split(whole, ends[:-1]), forms, strict=True)]


def _taught_otherwise(thing: object, original: type, names: tuple[str, ...]) -> bool:
    """Whether somebody has put something else in the place of one of the methods, in a class of their own or in the object."""
    return any(name in vars(thing) or getattr(type(thing), name) is not getattr(original, name) for name in names)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
