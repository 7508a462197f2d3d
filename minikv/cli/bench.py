"""measure the engine's speed, beside other engines and this machine's limits

Four workloads on a random model of 14.2 M parameters, float32, greedy. Speed is generated tokens a second over the
whole run, prefill included: the median of several runs, in which the engines take turns."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from time import perf_counter
from typing import Any

from minikv.errors import RequestError
from minikv.show import console

PEERS = ("hf",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", action="append", default=[], choices=PEERS, help="also run another engine on the same weights")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of which the median counts (default 3)")
    parser.add_argument("--quick", action="store_true", help="smaller workloads, one run each")
    parser.add_argument("--json", metavar="F", help="write the numbers to F")


def run(arguments: argparse.Namespace) -> int:
    if arguments.repeats < 1:
        raise RequestError(f"--repeats must be at least 1, not {arguments.repeats}")
    console.check_writable(arguments.json)
    started = perf_counter()
    with console.progress() as progress:
        task = progress.add_task("the machine's ceilings", total=None)
        content = measure(arguments.quick, arguments.repeats, arguments.peer, lambda text: progress.update(task, description=text))
    content["seconds"] = perf_counter() - started
    _print(content)
    console.write_json(arguments.json, content)
    return 0


def measure(quick: bool, repeats: int, peers: list[str], progress: Callable[[str], None]) -> dict[str, Any]:
    """Everything that the command measures, as it stands in the JSON file."""
    import minikv
    from minikv.lab import anatomy, bench, bookkeeping, ceilings
    from minikv.shape.model_shape import preset

    shape = preset("bench-14m")
    roof = ceilings.measure(shape, seconds=3 if quick else 8)
    model = minikv.load(shape=shape, seed=0)
    workloads = [bench.quick(workload) for workload in bench.WORKLOADS] if quick else bench.WORKLOADS
    rows, missing = bench.measure(model, workloads, roof, list(dict.fromkeys(peers)), 1 if quick else repeats, progress)
    progress("the attention kernel")
    sizes = ((12, 1000),) if quick else ((1, 1000), (12, 1000), (32, 128))
    kernel = [anatomy.kernel_bandwidth(shape, sequences, context) for sequences, context in sizes]
    progress("where the time goes")
    parts: dict[str, Any] = {}
    for requests, prompt_tokens in ((1, 32), (32, 96), (12, 950)):
        parts |= anatomy.anatomy(model, prompt_tokens, requests, repeats=8 if quick else 20)
    progress("bookkeeping")
    sizes_blocks = bookkeeping.CACHED_BLOCKS[:2] if quick else bookkeeping.CACHED_BLOCKS
    return {
        "machine": f"{platform.machine()}, {roof.threads} threads",
        "model": f"{shape.name}, {shape.parameters:,} parameters, float32, random weights",
        "ceilings": {
            "read_gb_s": roof.read_gb_s, "read_weights_gb_s": roof.read_weights_gb_s, "copy_gb_s": roof.copy_gb_s,
            "gemm_gflop_s": roof.gemm_gflop_s, "gemm_by_size_gflop_s": roof.gemm,
        },
        "rows": rows,
        "kernel": kernel,
        "step_parts_s": parts,
        "bookkeeping": bookkeeping.measure(sizes_blocks),
        "missing": missing,
    }  # fmt: skip


def _print(content: dict[str, Any]) -> None:
    roof = content["ceilings"]
    print(f"{content['machine']}; {content['model']}")
    print(
        f"ceilings: read {roof['read_gb_s']:.1f} GB/s ({roof['read_weights_gb_s']:.1f} over the size of the weights), "
        f"copy {roof['copy_gb_s']:.1f} GB/s (read + written), "
        f"GEMM {roof['gemm_gflop_s']:.0f} GFLOP/s ("
        + ", ".join(f"{size} {rate:.0f}" for size, rate in roof["gemm_by_size_gflop_s"].items())
        + ")"
    )
    console.show(_speed_table(content["rows"]))
    for name, reason in content["missing"].items():
        print(f"not measured: {name}: {reason}")
    console.show(_kernel_table(content["kernel"]))
    console.show(_parts_table(content["step_parts_s"]))
    console.show(_bookkeeping_table(content["bookkeeping"]))
    print(f"{content['seconds']:.0f} s in all")


def _speed_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("workload", "engine", "tokens/s", "ms a step", "of limit", "minikv is faster by")
    for row in rows:
        ours = row["engine"] == "minikv"
        if ours and table.row_count:
            table.add_section()
        note = f" ({row['requests']} of them)" if row["engine"].endswith("one by one") else ""
        table.add_row(
            row["workload"] if ours else "", row["engine"] + note, f"{row['tokens_per_s']:,.1f}",
            f"{1000 * row['step_s']:.1f}" if ours else "", f"{row['of_limit']:.0%}" if ours else "",
            "" if ours else f"{row['minikv_is_times_faster']:.2f}x",
        )  # fmt: skip
    return table


def _kernel_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("attention of one token each", "paged GB/s", "contiguous SDPA GB/s", "paged / contiguous")
    for row in rows:
        name = f"{row['sequences']} x {row['context']:,} tokens of context"
        table.add_row(name, f"{row['paged_gb_s']:.1f}", f"{row['contiguous_gb_s']:.1f}", f"{row['paged_of_contiguous']:.2f}")
    return table


def _parts_table(parts: dict[str, dict[str, float]]) -> object:
    names = list(next(iter(parts.values())))
    table = console.table("ms of one step", "in all", *names)
    for step, seconds in parts.items():
        table.add_row(step, f"{1000 * sum(seconds.values()):.2f}", *(f"{1000 * seconds[name]:.2f}" for name in names))
    return table


def _bookkeeping_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("bookkeeping alone, cached blocks", "us a looked-up prompt token", "us a decoded token")
    for row in rows:
        table.add_row(f"{row['cached_blocks']:,}", f"{row['lookup_us_per_prompt_token']:.2f}", f"{row['decode_us_per_token']:.1f}")
    return table
