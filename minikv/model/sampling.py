"""From logits to the next token.

Greedy decoding takes the largest logit. Sampling draws from softmax(logits / temperature), perhaps only among the
``top_k`` largest, or among the fewest tokens that together have ``top_p`` of the probability. The draw needs one
random number, and that number is a hash of (seed, sample, index of the output token) and of nothing else: so a request
samples the same text alone or in a batch, on a CPU or a GPU, preempted and recomputed or not.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

from minikv.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


MOST_SAMPLES = 256  # of one prompt


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen and when it ends.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1.0 keep every token. ``n`` texts are sampled from one prompt.
    ``seed`` None draws a seed when the request is added. The request ends after ``max_new_tokens``, at a token of
    ``stop_tokens`` or at one of the model's own end-of-text tokens (unless ``ignore_eos``), or before the first of the
    strings ``stop``. Whether the values make sense is checked when a request is added.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop_tokens", "stop"):
            if isinstance(getattr(self, name), Iterable):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    def check(self) -> None:
        """RequestError, saying which, for a value that makes no sense."""
        for name, least, most in (("max_new_tokens", 1, 2**31), ("top_k", 0, 2**31), ("n", 1, MOST_SAMPLES)):
            value = getattr(self, name)
            if not _is_whole(value) or value < least:
                raise RequestError(f"{name} must be a whole number of at least {least}, not {value!r}")
            if value > most:
                raise RequestError(f"{name} must be at most {most}, not {value!r}")
        if not (_is_number(self.temperature) and 0 <= self.temperature <= 1e6):
            raise RequestError(f"temperature must be a number of at least 0, and at most a million, not {self.temperature!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(f"top_p must be a number above 0 and at most 1, not {self.top_p!r}")
        if self.seed is not None and not (_is_whole(self.seed) and -(2**63) <= self.seed < 2**64):
            raise RequestError(f"seed must be None or a whole number of at most 64 bits, not {self.seed!r}")
        if not (isinstance(self.stop_tokens, tuple) and all(_is_whole(token) for token in self.stop_tokens)):
            raise RequestError(f"stop_tokens must be token ids, not {self.stop_tokens!r}")
        if not (isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop)):
            raise RequestError(f"a stop string must be a text with at least one character, not {self.stop!r}")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def uniform(seed: int, sample: int, index: int) -> float:
    """The random number in [0, 1) of output token ``index`` of sample number ``sample`` under ``seed``."""
    digest = hashlib.sha256(struct.pack("<QQQ", seed % 2**64, sample, index)).digest()
    return int.from_bytes(digest[:8], "little") / 2**64 * (1 - 2**-53)


@dataclass(slots=True)
class Draw:
    """One token to be chosen: from which row of the step's logits, how, and with which random number."""

    row: int
    sampling: Sampling
    seed: int
    sample: int
    index: int


class Best(NamedTuple):
    """For each row of logits: the token with the largest (int64), its log-probability, the logarithm of the exponentials' sum."""

    tokens: Tensor
    logprobs: Tensor
    sums: Tensor


def best_of(logits: Tensor) -> Best:
    """logits [rows, vocab]. Of equal largest ones, one counts; log-probabilities and sums are float32 at least."""
    import torch

    largest, tokens = logits.max(-1)
    sums = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
    return Best(tokens, largest - sums, sums)


def choose(logits: Tensor, draws: Sequence[Draw], best: Best | None = None) -> tuple[list[int], list[float]]:
    """Token and log-probability for each draw. logits [rows, vocab]; several draws may share a row.

    The log-probability is that of the model itself (temperature 1, nothing cut off). All is decided on the logits' own
    device, and comes back in one transfer: the only moment of a step at which the host waits for the device. ``best`` is
    what ``best_of(logits)`` gives but for rounding, where whoever made the logits has found it on the way.
    """
    tokens, logprobs, sums = best_of(logits) if best is None else best  # [rows] each
    rows = [draw.row for draw in draws]
    if rows != list(range(len(tokens))):
        where = _on_device(rows, logits)
        logits, tokens, logprobs, sums = logits[where], tokens[where], logprobs[where], sums[where]  # [draws] each
    sampled = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if sampled:
        where = _on_device(sampled, logits)
        theirs = logits[where]
        drawn = _sample(theirs, [draws[i] for i in sampled])
        tokens = tokens.index_put((where,), drawn)
        logprobs = logprobs.index_put((where,), theirs.gather(-1, drawn[:, None]).squeeze(-1) - sums[where])
    if logits.is_cpu:
        return tokens.tolist(), logprobs.tolist()
    import torch

    both = torch.stack((tokens.double(), logprobs.double())).tolist()  # float64 holds a token id exactly
    return [int(token) for token in both[0]], both[1]


def _sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """For each row the token whose stretch of the cumulative distribution holds the draw's number. Computed in float64.

    logits [draws, vocab]; returns [draws]. The distribution is laid out in the order of the vocabulary, not of the
    probabilities: two logits that swap ranks by a rounding error then move no other token's stretch. Logits that tie with the
    ``top_k``-th are all kept.
    """
    import torch

    def column(values: Iterable[float], dtype: torch.dtype = torch.float64) -> Tensor:  # [draws, 1]
        return _on_device(list(values), logits, dtype)[:, None]

    hows, vocab = [draw.sampling for draw in draws], logits.shape[-1]
    temperature = column(how.temperature for how in hows)
    scaled = (logits.double() - logits.amax(-1, keepdim=True)) / temperature  # at most 0: a tiny temperature gives -inf, never inf
    top_k = [how.top_k if 0 < how.top_k < vocab else vocab for how in hows]
    if min(top_k) < vocab:
        most = max(k for k in top_k if k < vocab)
        rank = column((min(k, most) - 1 for k in top_k), torch.int64)
        least = scaled.topk(most).values.gather(-1, rank)
        cut = column(k < vocab for k in top_k).bool()
        scaled = scaled.masked_fill((scaled < least) & cut, -math.inf)
    probability = scaled.softmax(-1)
    if any(how.top_p < 1 for how in hows):
        ordered, order = probability.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # probability of everything more likely
        top_p = column(how.top_p if how.top_p < 1 else math.inf for how in hows)
        probability = torch.zeros_like(probability).scatter_(-1, order, ordered.masked_fill(before >= top_p, 0))
    cumulative = probability.cumsum(-1)
    number = column(uniform(draw.seed, draw.sample, draw.index) for draw in draws)
    token = torch.searchsorted(cumulative, cumulative[:, -1:] * number, right=True)
    return token[:, 0].clamp(max=vocab - 1)


def _on_device(values: list[Any], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``values`` where ``like`` is, as int64 if nothing else is said. The host does not wait: a GPU fetches them when their turn comes."""
    import torch

    cuda = like.device.type == "cuda"
    return torch.tensor(values, dtype=dtype or torch.int64, pin_memory=cuda).to(like.device, non_blocking=cuda)
