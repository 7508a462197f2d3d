"""check and measure minikv on this machine's GPU

Parity of the Triton kernels with the CPU, bandwidth against a copy, steps against the roofline with and without CUDA
graphs, a published serving workload, the cache cliff, memory against arithmetic. About five minutes (--quick: one).
The exit status is 0 if all parity checks passed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from minikv.errors import RequestError
from minikv.show import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="F", help="write the numbers to F")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: about a minute")
    parser.add_argument("--only", metavar="NAME,NAME", help="these sections alone (machine, parity, memory, kernel, steps, ...)")
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, ...; cpu with TRITON_INTERPRET=1 tries the check itself, at a tiny size"
    )


def run(arguments: argparse.Namespace) -> int:
    started = perf_counter()
    console.check_writable(arguments.json)
    import torch

    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"There is no CUDA device that torch {torch.__version__} can use, so there is nothing to check here.")
        return 1
    from minikv.lab import gpu_check

    names = list(gpu_check.SECTIONS) if arguments.only is None else arguments.only.split(",")
    if unknown := [name for name in names if name not in gpu_check.SECTIONS]:
        raise RequestError(f"unknown section {unknown[0]!r}; there are {', '.join(gpu_check.SECTIONS)}")
    bench = gpu_check.make_bench(arguments.device, arguments.quick, started)
    results, left = gpu_check.run(bench, names, _print)
    if left:
        results |= _elsewhere(arguments, left)
    passed = bool(results.get("parity", {}).get("passed"))
    seconds = perf_counter() - started
    print(f"{seconds:.0f} s in all; parity: {'all passed' if passed else 'NOT PASSED' if 'parity' in names else 'not checked'}")
    console.write_json(arguments.json, {"parity_passed": passed, "seconds": seconds, "quick": arguments.quick, "sections": results})
    return 0 if passed else 1


def _elsewhere(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The sections ``names`` in a fresh process: in this one, the device answers no more."""
    print(f"the device is lost to this process; going on in another: {', '.join(names)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rest.json"
        command = [
            sys.executable,
            "-m",
            "minikv",
            "gpu-check",
            "--device",
            arguments.device,
            "--only",
            ",".join(names),
            "--json",
            str(file),
        ]
        subprocess.run(command + ["--quick"] * arguments.quick, check=False)
        if not file.exists():
            return {name: {"ok": False, "error": "the process that should have run it died", "seconds": 0.0} for name in names}
        return json.loads(file.read_text())["sections"]


# ---------------------------------------------------------------- printing, without anything but Python

Column = tuple[str, Callable[[dict[str, Any]], str]]


def _print(name: str, result: dict[str, Any]) -> None:
    """One section, as soon as it has ended."""
    print(f"\n== {name} ({result['seconds']:.1f} s)", flush=True)
    if not result["ok"]:
        print(f"FAILED: {result['error']}", flush=True)
        return
    PRINTERS.get(name, _print_plainly)(result)
    sys.stdout.flush()


def _print_plainly(result: dict[str, Any]) -> None:
    for key, value in result.items():
        if key not in ("ok", "seconds"):
            print(f"{key:24} {value:,.3f}" if isinstance(value, float) else f"{key:24} {value}")


def _table(rows: Sequence[dict[str, Any]], *columns: Column) -> None:
    lines = [[title for title, _ in columns]] + [[_cell(write, row) for _, write in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))))


def _cell(write: Callable[[dict[str, Any]], str], row: dict[str, Any]) -> str:
    try:
        return write(row)
    except (KeyError, TypeError):  # this row has no such figure
        return "-"


def _print_parity(result: dict[str, Any]) -> None:
    def verdict(row: dict[str, Any]) -> str:
        return "ok" if row["passed"] else f"NOT PASSED {row.get('error', '')}"

    _table(
        result["rows"], ("check", lambda r: r["check"]), ("error", lambda r: f"{r['error_at_most']:.1e}"),
        ("tolerance", lambda r: f"{r['tolerance']:.1e}"), ("tokens", lambda r: f"{r['tokens_compared']}"), ("", verdict),
    )  # fmt: skip


def _print_kernel(result: dict[str, Any]) -> None:
    _table(
        result["reads"], ("decode: sequences x context", lambda r: f"{r['sequences']} x {r['context']:,}"),
        ("GB/s", lambda r: f"{r['gb_s']:,.1f}"), ("of a copy", lambda r: f"{r['of_copy']:.0%}"),
        ("ms", lambda r: f"{1e3 * r['seconds']:.3f}"),
    )  # fmt: skip
    _table(
        result["chunks"], ("chunk: new tokens of context", lambda r: f"{r['new_tokens']:,} of {r['context']:,}"),
        ("TFLOP/s", lambda r: f"{r['tflop_s']:.1f}"), ("of GEMM", lambda r: f"{r['of_gemm']:.0%}"),
        ("torch SDPA, contiguous", lambda r: f"{r['torch_sdpa_tflop_s']:.1f}"), ("ms", lambda r: f"{1e3 * r['seconds']:.3f}"),
    )  # fmt: skip


def _print_steps(result: dict[str, Any]) -> None:
    _table(
        result["rows"], ("step", lambda r: f"{r['step']}, {r['sequences']} x {r['context']:,}"),
        ("graphs", lambda r: "yes" if r["graphs"] else "no"), ("ms", lambda r: f"{1e3 * r['seconds']:.2f}"),
        ("replay alone", lambda r: f"{1e3 * r['device_s']:.2f}"), ("limit ms", lambda r: f"{1e3 * r['limit_s']:.2f}"),
        ("of limit", lambda r: f"{r['of_limit']:.0%}"), ("tokens/s", lambda r: f"{r['new_tokens'] / r['seconds']:,.0f}"),
        ("", lambda r: r.get("error", "")),
    )  # fmt: skip


def _print_serving(result: dict[str, Any]) -> None:
    print(
        f"{result['requests']} requests, {result['prompt_tokens']:,} tokens in, {result['output_tokens']:,} out: "
        f"{result['seconds']:.1f} s, {result['tokens_per_s']:,.0f} tokens/s, {result['of_limit']:.0%} of the limit; "
        f"{result['steps']:,} steps, {result['executing_s']:.1f} s of them in the runner, {result['preemptions']} preemptions"
    )
    if result["without_graphs"]:
        print(f"without CUDA graphs: {result['without_graphs']}")
    for other in result["published"]:
        print(f"published: {other['engine']} {other['tokens_per_s']:,.0f} tokens/s on an {other['machine']} (another machine)")


def _print_cliff(result: dict[str, Any]) -> None:
    print(f"{result['fits_sessions']} sessions fit", *(f"(without CUDA graphs: {why})" for why in result["without_graphs"]))
    _table(
        result["rows"], ("sessions", lambda r: str(r["sessions"])), ("p50 TTFT ms", lambda r: f"{1e3 * r['p50_ttft_s']:,.0f}"),
        ("p99 TTFT ms", lambda r: f"{1e3 * r['p99_ttft_s']:,.0f}"), ("hit rate", lambda r: f"{r['hit_rate']:.1%}"),
        ("best", lambda r: f"{r['best_hit_rate']:.1%}"), ("tokens/s", lambda r: f"{r['tokens_per_s']:,.0f}"),
        ("s", lambda r: f"{r['seconds']:.1f}"),
    )  # fmt: skip


def _print_sizes(result: dict[str, Any]) -> None:
    _table(
        result["rows"], ("rows, warps, tile, stages", lambda r: f"{r['rows']}, {r['warps']}, {r['tile']}, {r['stages']}"),
        ("decode ms", lambda r: f"{1e3 * r['decode_s']:.3f}"), ("chunk ms", lambda r: f"{1e3 * r['chunk_s']:.3f}"),
        ("", lambda r: "chosen" if r["chosen"] else r.get("error", "")[:60]),
    )  # fmt: skip


PRINTERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "parity": _print_parity, "kernel": _print_kernel, "steps": _print_steps, "serving": _print_serving, "cliff": _print_cliff,
    "sizes": _print_sizes,
}  # fmt: skip
