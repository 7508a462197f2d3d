"""What policy costs by itself: scheduler, block pool and prefix cache with a runner that computes nothing.

An engine decides many times a second who runs and which blocks are whose. On a fast machine with a small model that
can become the bottleneck, and if any part of it walked over the cache it would become slower as the cache fills. So
it is timed with 1,000, 10,000 and 100,000 cached blocks: the figures should not depend on that number. Times are
processor time of the one thread that does the work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from time import thread_time
from typing import Any

from minikv.engine.engine import Engine
from minikv.engine.runner import StepResult
from minikv.engine.scheduler import Plan
from minikv.model.sampling import Sampling

CACHED_BLOCKS = (1_000, 10_000, 100_000)
PROMPT_BLOCKS = 62
VOCAB = 50_000


class NothingRunner:
    """Says the token 1 for everything that is asked, at once: what is left is the engine's own work."""

    vocab, max_context, tokenizer = VOCAB, 1 << 20, None
    stop_tokens: tuple[int, ...] = ()

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size

    def content(self) -> dict[str, str]:
        return {"model": "nothing"}

    def weights_changed(self) -> None: ...

    def now(self) -> float:
        return 0.0

    def wait_until(self, at: float) -> None: ...

    def execute(self, plan: Plan, now: float) -> StepResult:
        count = len(plan.draws)
        return StepResult([1] * count, [0.0] * count, now)


class FullPool:
    """An engine whose pool is full of ``cached_blocks`` cached blocks, and some of the prompts that filled it."""

    def __init__(self, cached_blocks: int, block_size: int = 16, sequences: int = 32) -> None:
        self.sequences, self.draw = sequences, random.Random(2)
        self.engine = Engine(runner=NothingRunner(cached_blocks, block_size), max_batch_tokens=1 << 16, max_batch_requests=sequences)
        self.prompts: list[list[int]] = []
        while self.engine.pool.evictions < 1:  # until it overflows
            self.prompts.append([*self._tokens(PROMPT_BLOCKS * block_size), 1])
            self._serve(self.prompts[-1])
        # Those that are looked up in every round stay cached; they must leave room for what is decoded in between.
        del self.prompts[: -max(1, min(8, cached_blocks // (2 * PROMPT_BLOCKS)))]

    def look_up_us(self) -> float:
        """us per token of prompts that are cached, from ``add`` to their only new token.

        Everything is included: checking the ids, hashing, finding, sharing and giving back the blocks.
        """
        times = []
        for prompt in self.prompts:
            start = thread_time()
            self._serve(prompt)
            times.append(1e6 * (thread_time() - start) / len(prompt))
        return median(times)

    def decode_us(self) -> float:
        """us per decoded token of ``sequences`` that decode side by side, each new block evicting a cached one.

        Averaged over whole blocks, so that tokens that begin or end one have their share.
        """
        block_size = self.engine.pool.block_size
        steps = 2 * block_size
        for number in range(self.sequences):
            self.engine.add(number, self._tokens(block_size), Sampling(max_new_tokens=steps + 2))
        self.engine.step()  # prefill
        start = thread_time()
        for _ in range(steps):
            self.engine.step()
        seconds = thread_time() - start
        while self.engine.has_work:
            self.engine.step()
        return 1e6 * seconds / (steps * self.sequences)

    def _serve(self, prompt: list[int]) -> None:
        self.engine.add("one", prompt, Sampling(max_new_tokens=1))
        while self.engine.has_work:
            self.engine.step()

    def _tokens(self, count: int) -> list[int]:
        return self.draw.choices(range(2, VOCAB), k=count)


def measure(cached_blocks: Sequence[int] = CACHED_BLOCKS, rounds: int = 15) -> list[dict[str, Any]]:
    """One row a pool size; the sizes take turns, and each figure is a median."""
    pools = {count: FullPool(count) for count in cached_blocks}
    look_up: dict[int, list[float]] = {count: [] for count in pools}
    decode: dict[int, list[float]] = {count: [] for count in pools}
    for turn in range(-3, rounds):  # the first turns warm up
        for count, pool in pools.items():
            decode_us = pool.decode_us()
            look_up_us = pool.look_up_us()
            if turn >= 0:
                decode[count].append(decode_us)
                look_up[count].append(look_up_us)
    return [
        {
            "cached_blocks": count,
            "lookup_us_per_prompt_token": median(look_up[count]),
            "decode_us_per_token": median(decode[count]),
            "cached_now_blocks": pool.engine.stats().cached_blocks,
        }
        for count, pool in pools.items()
    ]
