"""The tensors behind the blocks: K and V of all sequences in one pool, attended through block tables.

The pool is one tensor,

    [block, layer, k or v, kv_head, slot, head_dim]

so that one block, with all its layers, is one contiguous piece of memory: to send it to another tier or worker is one
copy. Inside a layer, the slots of one head lie behind each other, which is the order in which attention reads them.

One block more than asked for is kept as scratch. Steps may be padded to a few fixed sizes (a captured CUDA graph can
only replay a size that it has seen); the padding's K and V go to the scratch block, and nobody ever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minikv.cache.attention import kernel
from minikv.cache.blocks import blocks_for
from minikv.cache.step import Piece
from minikv.shape.model_shape import ModelShape


@dataclass
class StepTensors:
    """What one step's forward pass and attention kernels read; filled by ``Paged.begin``, never by them.

    With T tokens and S sequences (padding included). The kernels read nothing else about the batch. The whole numbers
    at the end are known on the host, so that a kernel chooses its way without waiting for the device.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + slot, where the token's K and V go
    logit_rows: Tensor  # [rows] int64: the tokens whose logits are wanted
    query_starts: Tensor  # [S + 1] int32: sequence s has the tokens query_starts[s] : query_starts[s + 1]
    context_lengths: Tensor  # [S] int32: tokens of s that have K and V once this step's are stored
    block_tables: Tensor  # [S, widest] int32, rows padded with the scratch block
    chunks: Tensor  # [C] int32: the sequences with more than one token in this step
    pieces: list[tuple[int, int, int]]  # on the host: (first token, tokens, context length) of each sequence
    max_query_tokens: int
    max_context_tokens: int
    buffer: Tensor | None = None  # the bytes of all tensors above, where they came in one copy


class Paged:
    """K and V in blocks. Who owns which block is decided elsewhere (blocks.py); here are only the bytes.

    ``num_blocks`` blocks can be used (one more is allocated, as scratch). ``attention`` names the kernel: "reference",
    "cpu", "gpu", or "auto" for the fastest that can run here. ``bucket`` maps a number of tokens to the size that a step is
    padded to; by default there is no padding.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attention: str = "auto",
        bucket: Callable[[int], int] = lambda tokens: tokens,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one slot, not {num_blocks} blocks of {block_size}")
        self.shape, self.num_blocks, self.block_size = shape, num_blocks, block_size
        self.device = torch.device(device)
        self.pool = torch.zeros((num_blocks + 1, shape.layers, 2, shape.kv_heads, block_size, shape.head_dim), dtype=dtype, device=device)
        self.scratch = num_blocks
        self.attention = kernel(attention, dtype, self.device)
        self.bucket = bucket
        self.step: StepTensors | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V."""
        return self.pool[0].nbytes

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to): what a forked sequence does before it writes into a shared tail."""
        for source, target in pairs:  # one after the other: a block may be written and then read
            self.pool[target].copy_(self.pool[source])

    def begin(self, pieces: Sequence[Piece], into: StepTensors | None = None) -> StepTensors:
        """Say who is in the step. Every piece's table must have a block for each of its tokens.

        ``into`` are tensors that ``reserve`` made: they are written over in place, and the step is padded to their size.
        Raises ValueError for an empty step, an empty piece, a table that is too short or a step that ``into`` has no
        room for; nothing is changed then.
        """
        if not pieces:
            raise ValueError("a step needs at least one piece")
        tokens = sum(len(piece.tokens) for piece in pieces)
        width = max(blocks_for(piece.end, self.block_size) for piece in pieces)
        if into is None:
            padded = max(self.bucket(tokens), tokens)
        else:
            padded, room = into.block_tables.shape
            if tokens > padded or width > room or any(len(piece.tokens) != 1 or piece.logits != "last" for piece in pieces):
                raise ValueError(f"{tokens} tokens with tables of {width} are no decode step of at most {padded} with tables of {room}")
            width = room
        surplus = padded - tokens  # every surplus token is a sequence of its own, one token long, in the scratch block
        arrays = self._padding(padded, len(pieces) + surplus, width)
        token_ids, positions, slots, tables = (arrays[name] for name in ("token_ids", "positions", "slots", "block_tables"))
        query_starts, context_lengths = arrays["query_starts"], arrays["context_lengths"]
        rows: list[int] = []
        chunks: list[int] = []
        spans: list[tuple[int, int, int]] = []
        first = 0
        for i, piece in enumerate(pieces):
            count, end = len(piece.tokens), piece.end
            used = blocks_for(end, self.block_size)
            if not count or piece.table is None or len(piece.table) < used:
                have = 0 if piece.table is None else len(piece.table)
                raise ValueError(f"sequence {piece.sequence!r}: {count} tokens up to {end} need {used} blocks, its table has {have}")
            tables[i, :used] = np.frombuffer(piece.table.blocks, np.int32, used)
            last = first + count
            token_ids[first:last] = piece.tokens
            if count == 1:  # decoding: the common case, without small array arithmetic
                position = piece.start
                positions[first] = position
                slots[first] = tables[i, position // self.block_size] * self.block_size + position % self.block_size
            else:
                chunks.append(i)
                place = np.arange(piece.start, end)
                positions[first:last] = place
                slots[first:last] = tables[i, place // self.block_size] * np.int64(self.block_size) + place % self.block_size
            query_starts[i + 1], context_lengths[i] = last, end
            spans.append((first, count, end))
            if piece.logits == "last":
                rows.append(last - 1)
            elif piece.logits == "all":
                rows.extend(range(first, last))
            first = last
        if surplus:
            query_starts[len(pieces) + 1 :] = np.arange(tokens + 1, padded + 1)
            spans += [(token, 1, 1) for token in range(tokens, padded)]
        if into is None:
            arrays["logit_rows"] = np.array(rows, np.int64)
        arrays["chunks"] = np.array(chunks, np.int32)
        self.step = self._send(arrays, spans, into)
        return self.step

    def reserve(self, sequences: int, width: int) -> StepTensors:
        """Tensors for decode steps of up to ``sequences`` sequences with tables of up to ``width`` blocks.

        ``begin`` fills them as often as it is asked to, and they stay where they are: a captured graph reads the same
        addresses at every replay. Every token wants logits. They begin as padding only. What the host knows about them
        holds for every step that fits; ``pieces``, which cannot, is empty.
        """
        arrays = self._padding(sequences, sequences, width)
        arrays["query_starts"][:] = np.arange(sequences + 1)
        buffer, tensors = self._copy(arrays)
        return StepTensors(**tensors, pieces=[], max_query_tokens=1, max_context_tokens=width * self.block_size, buffer=buffer)

    def _padding(self, tokens: int, sequences: int, width: int) -> dict[str, np.ndarray]:
        """The arrays of a step in which every token goes to the scratch block and every sequence has one token.

        64-bit numbers come first, so that in one run of bytes each array is aligned.
        """
        return {
            "token_ids": np.zeros(tokens, np.int64),
            "positions": np.zeros(tokens, np.int64),
            "slots": np.full(tokens, self.scratch * self.block_size, np.int64),
            "logit_rows": np.arange(tokens),
            "query_starts": np.zeros(sequences + 1, np.int32),
            "context_lengths": np.ones(sequences, np.int32),
            "block_tables": np.full((sequences, width), self.scratch, np.int32),
            "chunks": np.zeros(0, np.int32),
        }

    def _send(self, arrays: dict[str, np.ndarray], spans: list[tuple[int, int, int]], into: StepTensors | None) -> StepTensors:
        if into is not None:
            assert into.buffer is not None
            into.buffer.copy_(self._packed(arrays), non_blocking=True)
            return into
        buffer, tensors = None, {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.device.type != "cpu":
            buffer, tensors = self._copy(arrays)
        return StepTensors(
            **tensors, pieces=spans, buffer=buffer,
            max_query_tokens=max(count for _, count, _ in spans), max_context_tokens=max(end for _, _, end in spans),
        )  # fmt: skip

    def _copy(self, arrays: dict[str, np.ndarray]) -> tuple[Tensor, dict[str, Tensor]]:
        """``arrays`` on the device, as parts of one buffer: one copy a step, not one an array."""
        buffer, tensors, start = self._packed(arrays).to(self.device, non_blocking=True), {}, 0
        for name, array in arrays.items():
            part = buffer[start : start + array.nbytes]
            tensors[name] = part.view(torch.int64 if array.itemsize == 8 else torch.int32).view(array.shape)
            start += array.nbytes
        return buffer, tensors

    def _packed(self, arrays: dict[str, np.ndarray]) -> Tensor:
        """The arrays' bytes behind each other, on the host.

        For a GPU in pinned memory, from which it fetches them by itself while the host goes on. torch keeps a freed piece of
        such memory until the copies from it are done, so the next step gets another one.
        """
        size = sum(array.nbytes for array in arrays.values())
        packed = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()], out=packed.numpy())
        return packed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v in their slots, then attend; shapes as in ``model.transformer.KeyValueStore``."""
        if self.step is None:
            raise RuntimeError("attend before begin: say who is in the step first")
        return self.attention(q, k, v, self.pool, layer, self.step)
