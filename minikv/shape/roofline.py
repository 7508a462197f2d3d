"""What a step must do at the very least: how many bytes it moves and how many operations it computes.

A step reads every weight once, however many tokens are in it, and reads the K and V of everything that its sequences
have seen. It multiplies each new token with every weight (two operations a weight: multiply, add) and, in attention,
each query with every key and value that it may see. A machine that moves ``b`` bytes and computes ``f`` operations a
second can do it no faster than

    max(bytes / b, FLOPs / f)

the *roofline*. One token a step: the bytes decide (decode is bound by memory). Hundreds of tokens a step: the same
weights are used for all of them, and the operations decide (prefill is bound by compute). Plain arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minikv.shape.model_shape import BYTES_PER_NUMBER, ModelShape


@dataclass(frozen=True)
class StepCost:
    """The least that a step must move and compute. Costs add up with ``+``, field by field."""

    weight_bytes: int
    kv_bytes: int
    matrix_flops: int
    attention_flops: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> int:
        return self.matrix_flops + self.attention_flops

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.matrix_flops + other.matrix_flops,
            self.attention_flops + other.attention_flops,
        )

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The roofline: the longer of moving and computing, if each were all that the machine does."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def step_cost(
    shape: ModelShape, pieces: Iterable[tuple[int, int]], rows: int, dtype: str = "float32", kv_dtype: str | None = None
) -> StepCost:
    """The cost of a step over ``pieces`` of (new tokens, context tokens), with logits for ``rows`` of the new tokens.

    Weights are stored as ``dtype``, K and V as ``kv_dtype`` (None: as the weights).

    A piece's context counts everything that has K and V once the step is done, its new tokens included; they are the
    last of it, and each sees itself and what is before it. ValueError for a piece whose new tokens are none or more
    than its context.
    """
    pieces = list(pieces)
    for new, context in pieces:
        if not 1 <= new <= context:
            raise ValueError(f"a piece of {new} new tokens cannot have a context of {context}, which includes them")
    new_tokens = sum(new for new, _ in pieces)
    return StepCost(
        weight_bytes=weight_bytes(shape, new_tokens, rows, dtype),
        kv_bytes=sum(context for _, context in pieces)
        * shape.kv_bytes_per_token(kv_dtype or dtype),  # the new ones written, the others read
        matrix_flops=matrix_flops(shape, new_tokens, rows),
        attention_flops=sum(attention_flops(shape, new, context) for new, context in pieces),
    )


def layer_matrices(shape: ModelShape) -> int:
    """Numbers in one layer's matrices, that is without norms and biases."""
    return shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads) + 3 * shape.hidden * shape.ffn


def weight_bytes(shape: ModelShape, new_tokens: int, rows: int, dtype: str = "float32") -> int:
    """Bytes of weights that a step reads: all layers, the rows of the embedding that it looks up, and, if any logits
    are wanted, the last norm and the head. A tied head that is read anyway has the embedding's rows in it."""
    looked_up = 0 if shape.tied and rows else min(new_tokens, shape.vocab) * shape.hidden
    head = shape.hidden + shape.vocab * shape.hidden if rows else 0
    return int((shape.layers * shape.layer_parameters + looked_up + head) * BYTES_PER_NUMBER[dtype])


def matrix_flops(shape: ModelShape, new_tokens: int, rows: int) -> int:
    """Multiplications and additions of the matrix products: every new token through all layers, ``rows`` through the head."""
    return 2 * (new_tokens * shape.layers * layer_matrices(shape) + rows * shape.hidden * shape.vocab)


def attention_flops(shape: ModelShape, new: int, context: int) -> int:
    """Multiplications and additions of attention for the last ``new`` of ``context`` tokens, over all layers.

    A query takes a product of head_dim numbers with each key that it sees and adds up as many values: 4 head_dim a pair
    and query head. Query heads that share a KV head save bytes, not operations.
    """
    pairs = new * (context - new) + new * (new + 1) // 2  # all that was there before, and the triangle among the new ones
    return 4 * shape.layers * shape.heads * shape.head_dim * pairs
