"""The tensors behind the blocks: K and V of all sequences in one pool, attended through block tables.

The pool is one tensor,

    [block, layer, k or v, kv_head, slot, head_dim]

so that one block, with all its layers, is one contiguous piece of memory: to send it to another tier or worker is one
copy. Inside a layer, the slots of one head lie behind each other, which is the order in which attention reads them.

One block more than asked for is kept as scratch. Steps may be padded to a few fixed sizes (a captured CUDA graph can
only replay a size that it has seen); the padding's K and V go to the scratch block, and nobody ever reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from minikv.cache.attention import kernel
from minikv.cache.blocks import blocks_for
from minikv.cache.step import Piece
from minikv.shape.model_shape import ModelShape


class StepTensors:
    """What one step's forward pass and attention kernels read; filled by ``Paged.begin``, never by them.

    With T tokens and S sequences (padding included). All tensors are parts of one run of bytes, ``buffer``, which came to
    the device in one copy, and are cut from it when somebody asks for them: compiled code asks for their addresses only.
    The kernels read nothing else about the batch. ``pieces`` and the whole numbers behind it are known on the host, so that
    a kernel chooses its way without waiting for the device.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + slot, where the token's K and V go
    logit_rows: Tensor  # [rows] int64: the tokens whose logits are wanted
    query_starts: Tensor  # [S + 1] int32: sequence s has the tokens query_starts[s] : query_starts[s + 1]
    context_lengths: Tensor  # [S] int32: tokens of s that have K and V once this step's are stored
    block_tables: Tensor  # [S, width] int32, rows padded with the scratch block
    chunks: Tensor  # [C] int32: the sequences with more than one token in this step

    def __init__(self, buffer: Tensor, layout: _Layout, pieces: list[tuple[int, int, int]], most_tokens: int, most_context: int) -> None:
        self.buffer, self.layout = buffer, layout
        self.pieces = pieces  # (first token, tokens, context length) of each sequence
        self.max_query_tokens, self.max_context_tokens = most_tokens, most_context
        self.num_tokens, self.num_rows, self.width = layout.tokens, layout.rows, layout.width

    def __getattr__(self, name: str) -> Tensor:
        """Cut one of the tensors from the buffer; from then on it is an attribute like others."""
        if name not in self.__annotations__:
            raise AttributeError(f"a step has no {name!r}")
        start, end, dtype = self.layout.part(name)
        part = self.buffer[start:end].view(dtype)
        cut = part.view(self.layout.sequences, self.width) if name == "block_tables" else part
        setattr(self, name, cut)
        return cut

    def address(self, name: str) -> int:
        """Where the numbers of one of the tensors begin, on a CPU."""
        return self.buffer.data_ptr() + self.layout.part(name)[0]


class _Layout:
    """Which bytes of a step's buffer are whose. 64-bit numbers come first, so that each array is aligned."""

    def __init__(self, tokens: int, rows: int, sequences: int, width: int, chunks: int) -> None:
        self.tokens, self.rows, self.sequences, self.width = tokens, rows, sequences, width
        sizes = (8 * tokens, 8 * tokens, 8 * tokens, 8 * rows, 4 * (sequences + 1), 4 * sequences, 4 * sequences * width, 4 * chunks)
        self.ends = tuple(accumulate(sizes))

    def part(self, name: str) -> tuple[int, int, torch.dtype]:
        """First byte, the one after the last, and the kind of number."""
        place = _PLACES[name]
        return self.ends[place - 1] if place else 0, self.ends[place], torch.int64 if place < 4 else torch.int32


_PLACES = {name: place for place, name in enumerate(StepTensors.__annotations__)}


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
        spans = self._spans(pieces)
        tokens, width = spans[-1][0] + spans[-1][1], -(-max(end for _, _, end in spans) // self.block_size)
        if into is None:
            padded = max(self.bucket(tokens), tokens)
        else:
            padded, room = len(into.token_ids), into.width
            if tokens > padded or width > room or any(len(piece.tokens) != 1 or piece.logits != "last" for piece in pieces):
                raise ValueError(f"{tokens} tokens with tables of {width} are no decode step of at most {padded} with tables of {room}")
            width = room
        parts = self._written_down(pieces, spans, width, padded - tokens, every_row=into is not None)
        packed = self._packed(parts)
        if into is not None:
            into.buffer.copy_(packed, non_blocking=True)
            self.step = into
            return into
        spans += [(token, 1, 1) for token in range(tokens, padded)]
        most_tokens, most_context = max(count for _, count, _ in spans), max(end for _, _, end in spans)
        buffer = packed if self.device.type == "cpu" else packed.to(self.device, non_blocking=True)
        layout = _Layout(padded, len(parts[3]), len(spans), width, len(parts[7]))
        self.step = StepTensors(buffer, layout, spans, most_tokens, most_context)
        return self.step

    def _spans(self, pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
        """(first token, tokens, context length) of each piece; ValueError for one that cannot be computed."""
        spans, first = [], 0
        for piece in pieces:
            count = len(piece.tokens)
            end = piece.start + count
            have = 0 if piece.table is None else len(piece.table.blocks)
            if not count or have * self.block_size < end:
                used = blocks_for(end, self.block_size)
                raise ValueError(f"sequence {piece.sequence!r}: {count} tokens up to {end} need {used} blocks, its table has {have}")
            spans.append((first, count, end))
            first += count
        return spans

    def _written_down(
        self, pieces: Sequence[Piece], spans: list[tuple[int, int, int]], width: int, surplus: int, every_row: bool
    ) -> tuple[array[int], ...]:
        """The numbers of a step's tensors, in their order: of its pieces, then of ``surplus`` tokens of padding.

        Every surplus token is a sequence of its own, one token long, in the scratch block. With ``every_row`` it wants logits.
        """
        token_ids, positions, slots, rows = array("q"), array("q"), array("q"), array("q")
        starts, contexts, tables, chunks = array("i", (0,)), array("i"), array("i"), array("i")
        size, scratch = self.block_size, array("i", (self.scratch,))
        for i, (piece, (first, count, end)) in enumerate(zip(pieces, spans, strict=True)):
            assert piece.table is not None
            start, blocks = piece.start, piece.table.blocks[: -(-end // self.block_size)]
            if count == 1:  # decoding, the common case
                token_ids.append(piece.tokens[0])
                positions.append(start)
                slots.append(blocks[-1] * size + start % size)
            else:
                chunks.append(i)
                token_ids.extend(iter(piece.tokens))  # of an array, too, of whatever kind of number
                positions.extend(range(start, end))
                for begin in range(start - start % size, end, size):  # block by block
                    shift = blocks[begin // size] * size - begin
                    slots.extend(range(max(begin, start) + shift, min(begin + size, end) + shift))
            if piece.logits == "last":
                rows.append(first + count - 1)
            elif piece.logits == "all":
                rows.extend(range(first, first + count))
            starts.append(first + count)
            contexts.append(end)
            tables += blocks
            if len(blocks) < width:
                tables += scratch * (width - len(blocks))
        if surplus:
            tokens = len(token_ids)
            token_ids.extend([0] * surplus)
            positions.extend([0] * surplus)
            slots.extend([self.scratch * size] * surplus)
            rows.extend(range(tokens, tokens + surplus) if every_row else ())
            starts.extend(range(tokens + 1, tokens + surplus + 1))
            contexts.extend([1] * surplus)
            tables += scratch * (surplus * width)
        return token_ids, positions, slots, rows, starts, contexts, tables, chunks

    def reserve(self, sequences: int, width: int) -> StepTensors:
        """Tensors for decode steps of up to ``sequences`` sequences with tables of up to ``width`` blocks.

        ``begin`` fills them as often as it is asked to, and they stay where they are: a captured graph reads the same
        addresses at every replay. Every token wants logits. They begin as padding only. What the host knows about them
        holds for every step that fits; ``pieces``, which cannot, is empty.
        """
        packed = self._packed(self._written_down((), [], width, sequences, every_row=True))
        return StepTensors(packed.to(self.device), _Layout(sequences, sequences, sequences, width, 0), [], 1, width * self.block_size)

    def _packed(self, parts: Iterable[array[int]]) -> Tensor:
        """The parts behind each other, as bytes on the host.

        For a GPU in pinned memory, from which it fetches the step by itself while the host goes on. torch keeps a freed piece
        of such memory until the copies from it are done, so the next step gets another one.
        """
        packed = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        return packed.pin_memory() if self.device.type == "cuda" else packed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v in their slots, then attend; shapes as in ``model.transformer.KeyValueStore``."""
        if self.step is None:
            raise RuntimeError("attend before begin: say who is in the step first")
        return self.attention(q, k, v, self.pool, layer, self.step)
