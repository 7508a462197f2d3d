"""What an engine counts. Counters are exact and the same on every machine; clocks are neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Stats:
    """A snapshot of an engine's counters; read them as attributes or by name, ``stats["hit_tokens"]``.

    ``free_blocks`` are those that a request could have, evictable cached ones included; ``cached_blocks`` are those
    cached ones alone. ``prompt_tokens`` and ``hit_tokens`` count each request's prompt once, at its first admission;
    ``computed_tokens`` counts everything that went through the model, recomputation included.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    evictions: int
    steps: int
    running: int
    waiting: int
    tier_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that did not have to be computed; 0.0 before there is a prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def keys(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __getitem__(self, name: str) -> Any:
        if name not in set(self.keys()):
            raise KeyError(f"no counter {name!r}; there are {', '.join(self.keys())}")
        return getattr(self, name)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least ``percent`` % of ``values`` do not exceed.

    ValueError for no values, or a percentage outside 0 < percent <= 100.
    """
    if not values or not 0 < percent <= 100:
        raise ValueError(f"a percentile needs values and 0 < percent <= 100, not {len(values)} values and {percent}")
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100).__int__() - 1]
