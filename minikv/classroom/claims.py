"""What the course's sources say in numbers, and what is left of it when it is computed again.

A chapter writes such a figure through ``claim(name, computed)`` and in no other way. The band that a computed value must
lie in is one number for arithmetic, and two for what is measured or simulated. Sources:

    the talk        Khawaja Shams (Momento), "Serving LLMs at Scale: The Hidden KV Cache Advantage", QCon AI Boston 2026
    the blog        Sankalp Shubham, "How prompt caching works", 2025-11-30, parts 2 and 3
    the explainer   Avi Chawla, "KV Caching in LLMs, clearly explained"
    the paper       Woosuk Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv 2309.06180
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SOURCES = {"talk": "The talk", "blog": "The blog", "explainer": "The explainer", "paper": "The PagedAttention paper"}


@dataclass(frozen=True)
class Claim:
    """A figure of a source. ``low`` and ``high`` bound what computing it again gives; ``show`` writes it with its unit."""

    chapter: int
    source: str
    says: str
    low: float
    high: float
    show: Callable[[float], str]
    verdict: str

    @property
    def source_name(self) -> str:
        return SOURCES[self.source]

    def check(self, computed: float) -> None:
        """AssertionError when ``computed`` is not what the verdict rests on."""
        assert self.low <= computed <= self.high, (
            f"{self.source_name} says {self.says!r}; the verdict rests on {_range(self.low, self.high)}, but {computed:,g} was computed"
        )


def _range(low: float, high: float) -> str:
    return f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"


def _bytes(count: float) -> str:
    from minikv.shape.size import with_unit

    return with_unit(count)


def _plain(unit: str, digits: int = 0) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f} {unit}".strip()


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


GB = 10**9

CLAIMS: dict[str, Claim] = {
    # ------------------------------------------------------------ the talk
    "72-kb-a-token": Claim(
        3, "talk", "72 KB a token for Qwen3-4B (36 layers, 8 KV heads of 128).", 147_456, 147_456, _bytes,
        "right only with an fp8 cache (73,728 B = 72 KiB); in bf16, with K *and* V, it is twice as much.",
    ),
    "128-dimensional-embedding": Claim(
        3, "talk", "a 128-dimensional embedding.", 2_560, 2_560, _plain("numbers in a hidden state"),
        "the wrong word: 128 is the size of one head, the hidden state is 20 times as wide.",
    ),
    "20000-tokens-1.6-gb": Claim(
        3, "talk", "20,000 tokens take 1.6 GB.", 20_000 * 73_728, 20_000 * 73_728, _bytes,
        "loose: in fp8 20,000 tokens are 1.47 GB; the 22,800 tokens of its experiment are 1.68 GB.",
    ),
    "13-conversations-fit": Claim(
        8, "talk", "about 13 conversations fit on the L4.", 176_400, 176_400, _plain("tokens for 13 that share the system prompt"),
        "needs sharing: 13 whole copies in fp8 are 21.9 GB and do not fit beside 4.4 GB of weights in 24 GB; with one shared "
        "10,000-token prefix they are 13.0 GB. The real capacity was not published.",
    ),
    "p99-2.6-to-38.9": Claim(
        8, "talk", "p99 time to first token goes from 2.6 s with 12 sessions to 38.9 s with 14.", 5, 40, _plain("times", 1),
        "a cliff, computed as well: the published jump is 38.9 / 2.6 = 15.0 times. Where it stands depends on the unpublished "
        "capacity, how large the jump is on the unpublished step budget, which moves the wait before it.",
    ),
    "32-gb-moves-the-cliff": Claim(
        9, "talk", "32 GB of DRAM move the cliff from 14 to 28 sessions, and 16 GB are the knee.", 27.1 * GB, 27.3 * GB, _bytes,
        "consistent, if DRAM holds a copy of everything.",
    ),
    "two-gpus-58-to-91": Claim(
        11, "talk", "two GPUs reach 128 tokens/s (58 %) without affinity and 201 with it.", 0.905, 0.915, _percent,
        "self-consistent: 128 / 0.58 = 220.7 is the ideal, and 201 is 91 % of it.",
    ),
    "90-percent-off": Claim(
        13, "talk", "cached tokens are about 90 % off.", 0.9, 0.9, _percent,
        "right for reads; a write can cost 1.25 to 2 times the plain price.",
    ),
    "kv-hardly-shared": Claim(
        6, "talk", "KV can hardly be shared between conversations.", 10_000 / 22_900, 10_000 / 22_800, _percent,
        "overstated: so much of a full session is the system prompt that all sessions of its own experiment share.",
    ),
    "timestamp-before-the-prompt": Claim(
        6, "talk", "an engine puts a timestamp before the prompt, and nothing hits any more.", 0, 0, _plain("cached tokens"),
        "the right lesson, garbled: the documented case is a client that put a billing header, new for each request, into the "
        "system prompt (mended in llama.cpp, PR 21793).",
    ),
    # ------------------------------------------------------------ the blog
    "half-a-mb-a-token": Claim(
        3, "blog", "0.5 MB a token for a 7B model.", 524_288, 524_288, _bytes,
        "right in binary units (0.5 MiB), and only with a KV head for every query head: Llama-3.1-8B needs a quarter.",
    ),
    "1k-tokens-512-mb": Claim(
        3, "blog", "1K tokens take 512 MB.", 512 * 2**20, 512 * 2**20, _bytes, "right: 512 MiB.",
    ),
    "100-requests-50-gb": Claim(
        3, "blog", "100 requests of 1K tokens take 50 GB.", 50 * 2**30, 50 * 2**30, _bytes, "right in binary units: 50 GiB are 53.7 GB.",
    ),
    "50-gb-on-an-a100": Claim(
        3, "blog", "those 50 GB stand on an A100-80 beside weights, activations and gradients.", 66.5 * GB, 67.5 * GB, _bytes,
        "half right: weights and KV are this much together, so little of the 80 GB is left; but inference has no gradients.",
    ),
    "500-token-prompt-25-gb": Claim(
        6, "blog", "a 500-token prompt is 250 MB, and 25 GB for a hundred requests.", 100 * 250 * 2**20, 100 * 250 * 2**20, _bytes,
        "right, rounded: 250 MiB and 24.4 GiB; shared, it is there once.",
    ),
    "4k-to-128k": Claim(
        4, "blog", "from 4K to 128K the reservation grows 32 times.", 32, 32, _plain("times"), "right.",
    ),
    "924-of-1024": Claim(
        4, "blog", "924 of 1,024 reserved slots are wasted by a request of 100 tokens.", 924, 924, _plain("slots"),
        "right: 90.2 %.",
    ),
    "round-4-seven-wasted": Claim(
        1, "blog", "in round 4, 7 tokens are computed again.", 8, 8, _plain("tokens computed again in round 4"),
        "off by one: the picture is that of round 3. Round 4 has 9 tokens, 8 of them computed before.",
    ),
    "capital-and-Capital": Claim(
        6, "blog", '"capital" and "Capital" stand for the same prefix in one example.', 0, 0, _plain("shared tokens from that word on"),
        "a slip: they are different tokens, so a prefix cache misses from there on.",
    ),
    "49-recomputed-49-times": Claim(
        1, "blog", "the first 49 tokens are recomputed 49 times.", 1_225, 1_225, _plain("tokens computed again in all"),
        "only the first: token i is computed again 50 - i times.",
    ),
    "input-to-output-ratio": Claim(
        2, "blog", "the more input for each token of output, the more a cache helps.", 497, 498,
        _plain("times fewer token passes, 50,000 in and 500 out", 1),
        "misleading: the gain grows with the input only until it reaches the number of output tokens.",
    ),
    "vllm-prefers-decode": Claim(
        7, "blog", "vLLM prefers decode.", 0, 0, _plain("decoding requests left out of a step while a long prompt is taken in"),
        "right for V1 (and for minikv, where it was counted); V0 preferred prefill unless told otherwise.",
    ),
    # ------------------------------------------------------------ the explainer
    "qwen-72b-32k": Claim(
        3, "explainer", "32K tokens of Qwen2.5-72B take several GB.", 10 * 2**30, 10 * 2**30, _bytes,
        "right with its 8 KV heads; with one for each of the 64 query heads it would be 80 GiB.",
    ),
    "hundreds-exceed-the-weights": Claim(
        3, "explainer", "at hundreds of requests the cache is larger than the weights.", 14, 14,
        _plain("requests of 32K tokens are enough"),
        "depends on the length: 14 requests at 32K, about 108 at 4K.",
    ),
    "5x-faster": Claim(
        2, "explainer", "a KV cache is 5 times faster.", 1.5, 10_000, _plain("times, measured here at the longest length", 1),
        "no constant: without a model, a length and a machine it says nothing. The measured gain rises with the length of the answer.",
    ),
    "cost-is-quadratic": Claim(
        1, "explainer", "without a cache the cost is O(n^2).", 2.9, 3.1, _plain("is the power of n in the attention of a whole answer", 2),
        "imprecise: the projections, recomputed, cost O(n^2), the attention O(n^3); with a cache attention is still O(n^2) in all.",
    ),
    # ------------------------------------------------------------ the PagedAttention paper
    "96-percent-useful": Claim(
        5, "paper", "96.3 % of the KV memory hold tokens in vLLM.", 0.94, 0.985, _percent,
        "plausible: requests of similar lengths (a trace of our own) come close to it in blocks of 16. That is no reproduction: model, "
        "requests and scheduler are others.",
    ),
}  # fmt: skip
"""By name. Each belongs to the chapter where the figure is met."""
