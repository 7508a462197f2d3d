"""Decode steps as CUDA graphs: recorded once for a size of batch, then replayed as one piece.

A decode step is some hundreds of small kernels. To launch each from Python takes longer than the card needs to run it,
so that a small model spends most of a step waiting for its host. A *CUDA graph* is the list of those launches, recorded
once and started by one call. It repeats exactly what was recorded: the same kernels over the same addresses. So

    the tensors stay     what changes from step to step (tokens, positions, slots, block tables, lengths) is written into
                         tensors that stay where they are, in one copy (``Paged.reserve`` and ``begin(..., into=)``);
    the sizes stay       a batch is padded to the next of a few sizes, and its block tables to a width; the padding is
                         computed like everybody else, in the scratch block, and nobody looks at it;
    nothing is asked     no kernel may need a number on the host, and none does.

Prefill is not recorded: its sizes are all different, and its kernels are long enough to hide their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from minikv.cache.blocks import blocks_for
from minikv.cache.paged import Paged, StepTensors
from minikv.cache.step import Piece
from minikv.model.transformer import Transformer

MOST_SEQUENCES = 256  # a larger batch decodes without a graph: its kernels hide their launches
LEAST_WIDTH = 64  # blocks


def bucket(sequences: int) -> int:
    """The size to which a decode step of so many sequences is padded: 1, 2, 4, 8, 16, then every multiple of 16."""
    return -(-sequences // 16) * 16 if sequences > 8 else 1 << (sequences - 1).bit_length()


def _width(blocks: int) -> int:
    return max(LEAST_WIDTH, 1 << (blocks - 1).bit_length())


class Captured:
    """``function``, recorded on its first call and replayed on every later one.

    It takes no arguments: what it reads and writes are tensors that stay in place. It must be safe to call twice in a
    row. Where there are no CUDA graphs a replay calls it again, so that all around it can be tested on a CPU.
    """

    def __init__(self, function: Callable[[], object], device: torch.device, memory: Any = None) -> None:
        self.replay: Callable[[], object] = function
        if device.type != "cuda":
            function()
            return
        aside = torch.cuda.Stream(device)  # what is compiled or set up at a first call must not fall into the recording
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            function()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            function()  # recorded, not run: the call above has computed this step
        self.replay = graph.replay


class DecodeGraphs:
    """The decode steps of ``model`` over the pool of ``kv``, one graph for each size of batch and of block tables.

    Graphs are recorded when a size is first met, or ahead by ``prepare``. They share one pool of memory, since only one
    runs at a time, and leave their logits in one tensor: what a call returns is valid until the next.
    """

    def __init__(self, model: Transformer, kv: Paged, most_sequences: int = MOST_SEQUENCES) -> None:
        self.model, self.kv, self.most_sequences = model, kv, bucket(most_sequences)
        self.memory = torch.cuda.graph_pool_handle() if kv.device.type == "cuda" else None
        self.steps: dict[tuple[int, int], tuple[StepTensors, Captured]] = {}
        self.logits = torch.empty(self.most_sequences, model.shape.vocab, dtype=model.dtype, device=kv.device)

    def can(self, pieces: Sequence[Piece]) -> bool:
        """Whether a step of ``pieces`` is a decode step that a graph has room for."""
        return len(pieces) <= self.most_sequences and all(len(piece.tokens) == 1 and piece.logits == "last" for piece in pieces)

    def __call__(self, pieces: Sequence[Piece]) -> Tensor:
        """K and V into the pool; logits [len(pieces), vocab]. ``can`` has said yes."""
        size = self.size(pieces)
        if size in self.steps:
            step, captured = self.steps[size]
            self.kv.begin(pieces, into=step)
            captured.replay()
        else:
            step = self.kv.reserve(*size)
            self.kv.begin(pieces, into=step)
            self.steps[size] = step, Captured(self._forward(step), self.kv.device, self.memory)
        return self.logits[: len(pieces)]

    def size(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """Sequences and width of the graph for a step of ``pieces``: the narrowest that was recorded, or else one to record."""
        sequences, needed = bucket(len(pieces)), max(blocks_for(piece.end, self.kv.block_size) for piece in pieces)
        recorded = [width for others, width in self.steps if others == sequences and width >= needed]
        return sequences, min(recorded, default=_width(needed))

    def prepare(self, sequences: Iterable[int], context: int) -> None:
        """Record the graphs for batches of ``sequences``, of up to ``context`` tokens each, before anybody waits for them.

        The largest is recorded first, so that the memory it takes does for all others. Of the pool, only the scratch block is
        written.
        """
        width = _width(blocks_for(context, self.kv.block_size))
        for size in sorted({(bucket(count), width) for count in sequences} - self.steps.keys(), reverse=True):
            step = self.kv.step = self.kv.reserve(*size)
            with torch.inference_mode():
                self.steps[size] = step, Captured(self._forward(step), self.kv.device, self.memory)

    def forget(self) -> None:
        """Drop all graphs: the weights may lie elsewhere now."""
        self.steps.clear()

    def _forward(self, step: StepTensors) -> Callable[[], object]:
        """The forward pass over ``step``, its logits copied to where all graphs leave them."""
        logits = self.logits[: step.num_tokens]
        return lambda: logits.copy_(self.model(step.token_ids, step.positions, self.kv))
