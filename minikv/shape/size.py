"""How many bytes, in words: sums over tokens and requests, and units that are never mixed up.

GB and KB are decimal (10^9, 10^3), GiB and KiB binary (2^30, 2^10); at a gigabyte they differ by 7 %, which is how 50 GiB
come to be called 50 GB.
"""

from __future__ import annotations

from minikv.shape.model_shape import ModelShape


def with_unit(count: float) -> str:
    """ "147,456 B = 147.5 KB = 144.0 KiB": bytes, decimal and binary; small numbers in bytes alone."""
    exact = f"{count:,.0f} B"
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if count >= 1000**power:
            return f"{exact} = {count / 1000**power:.2f} {letter}B = {count / 1024**power:.2f} {letter}iB"
    return exact


def kv_bytes(shape: ModelShape, tokens: int, requests: int = 1, shared_tokens: int = 0, kv_dtype: str = "bf16") -> int:
    """Bytes of KV of ``requests`` requests of ``tokens`` tokens each, whose first ``shared_tokens`` are stored once."""
    stored = shared_tokens + requests * (tokens - shared_tokens)
    return stored * shape.kv_bytes_per_token(kv_dtype)


def fitting_requests(shape: ModelShape, free_bytes: int, tokens: int, shared_tokens: int = 0, kv_dtype: str = "bf16") -> int:
    """Requests of ``tokens`` tokens, the first ``shared_tokens`` stored once, whose KV fits in ``free_bytes``.

    ValueError when a request shares all of its tokens: then any number fits, if one does.
    """
    a_token = shape.kv_bytes_per_token(kv_dtype)
    if shared_tokens >= tokens:
        raise ValueError(f"all {tokens} tokens are shared: any number of requests fits, or none")
    return max(0, (free_bytes // a_token - shared_tokens) // (tokens - shared_tokens))
