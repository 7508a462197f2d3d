"""what a model's tokens weigh, and how many requests fit on a GPU

Sizes are given twice, in decimal units (GB = 10^9 bytes) and in binary ones (GiB = 2^30 bytes), because data sheets use
the former and programs often the latter."""

from __future__ import annotations

import argparse
from typing import Any

from minikv.errors import RequestError
from minikv.show import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a preset such as qwen3-4b, or a folder with a config.json")
    parser.add_argument("--tokens", type=int, default=1, metavar="N", help="tokens a request, its shared prefix included (default 1)")
    parser.add_argument("--requests", type=int, default=1, metavar="N", help="requests at the same time (default 1)")
    parser.add_argument("--shared-tokens", type=int, default=0, metavar="N", help="of a request's tokens, the prefix that all share")
    parser.add_argument("--kv-dtype", default="bf16", metavar="DTYPE", help="bf16 (default), fp8 or int4 (with its scales)")
    parser.add_argument("--weight-dtype", default="bf16", metavar="DTYPE", help="default bf16")
    parser.add_argument("--json", metavar="F", help="write the numbers to F")


def run(arguments: argparse.Namespace) -> int:
    from minikv.shape.hardware import HARDWARE
    from minikv.shape.model_shape import BYTES_PER_NUMBER, find_shape
    from minikv.shape.size import fitting_requests, kv_bytes, with_unit

    console.check_writable(arguments.json)
    if arguments.tokens < 1 or arguments.requests < 1 or not 0 <= arguments.shared_tokens < arguments.tokens:
        raise RequestError(
            f"a request needs at least one token, and one of its own besides those that it shares; got --tokens {arguments.tokens}, "
            f"--requests {arguments.requests}, --shared-tokens {arguments.shared_tokens}"
        )
    try:
        shape = find_shape(arguments.model)
        a_token = shape.kv_bytes_per_token(arguments.kv_dtype)
        if arguments.weight_dtype not in BYTES_PER_NUMBER:
            raise ValueError(f"unknown dtype {arguments.weight_dtype!r}; known are {', '.join(BYTES_PER_NUMBER)}")
    except ValueError as wrong:
        raise RequestError(str(wrong)) from None
    tokens, requests, shared = arguments.tokens, arguments.requests, arguments.shared_tokens
    total = kv_bytes(shape, tokens, requests, shared, arguments.kv_dtype)
    weights = None if shape.mla_latent is not None else int(shape.parameters * BYTES_PER_NUMBER[arguments.weight_dtype])

    stored = f"{shape.kv_heads} KV heads of {shape.head_dim}" if shape.mla_latent is None else f"{shape.mla_latent} numbers a token"
    print(f"{shape.name}: {shape.attention}, {shape.layers} layers, {stored}")
    print(f"a token in {arguments.kv_dtype}: {with_unit(a_token)}")
    prefix = f", {shared:,} of them shared" if shared else ""
    print(f"{console.counted(requests, 'request')} of {console.counted(tokens, 'token')}{prefix}: {with_unit(total)}")
    rows: list[dict[str, Any]] = []
    if weights is not None:
        print(f"weights in {arguments.weight_dtype}: {with_unit(weights)}")
        table = console.table("GPU", "memory", "left for KV", "requests that fit", "with the shared prefix")
        for gpu in HARDWARE.values():
            left = int(gpu.memory_bytes) - weights
            alone = fitting_requests(shape, left, tokens, 0, arguments.kv_dtype)
            sharing = fitting_requests(shape, left, tokens, shared, arguments.kv_dtype)
            rows.append({"hardware": gpu.name, "left_bytes": left, "fits": alone, "fits_sharing": sharing})
            table.add_row(
                gpu.name, f"{gpu.memory_bytes / 1e9:.0f} GB", f"{left / 1e9:.1f} GB" if left > 0 else "the weights do not fit",
                f"{alone:,}", f"{sharing:,}" if shared else "-",
            )  # fmt: skip
        console.show(table)
        print("Beside the weights a server also needs room for activations, usually a few GB; it is not taken off here.")
    console.write_json(
        arguments.json,
        {
            "model": shape.name, "bytes_per_token": a_token, "total_bytes": total, "tokens": tokens, "requests": requests,
            "shared_tokens": shared, "kv_dtype": arguments.kv_dtype, "weight_bytes": weights, "hardware": rows,
        },
    )  # fmt: skip
    return 0
