"""Tables, progress and JSON files on a terminal, and numbers in arguments: what the subcommands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minikv.errors import RequestError


def table(*columns: str) -> Any:
    """A rich table whose first column is left-aligned and whose numbers are right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD)
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left")
    return made


def cliff_table(rows: Sequence[Any], fits: int, unit: str = "s") -> Any:
    """Sessions against time to first token, one row for each ``lab.cliff.CliffRow``; a rule where the pool is full.

    ``unit`` of the times is "s" or "ms".
    """
    scale, digits = (1000, 0) if unit == "ms" else (1, 2)
    made = table(
        "sessions", f"p50 TTFT {unit}", f"p99 TTFT {unit}", "hit rate", "best", f"luckiest {unit}", f"unluckiest {unit}",
        "tokens/s", f"cold p99 {unit}",
    )  # fmt: skip
    below = False
    for row in rows:
        if row.sessions > fits and below:
            made.add_section()
        below = row.sessions <= fits
        times = (row.p50_ttft_s, row.p99_ttft_s, row.luckiest_ttft_s, row.unluckiest_ttft_s, row.cold_p99_ttft_s)
        p50, p99, luckiest, unluckiest, cold = (f"{scale * value:,.{digits}f}" for value in times)
        made.add_row(
            str(row.sessions), p50, p99, f"{row.hit_rate:.1%}", f"{row.best_hit_rate:.1%}", luckiest, unluckiest,
            f"{row.tokens_per_s:,.0f}", cold,
        )  # fmt: skip
    return made


def show(renderable: Any) -> None:
    """Print a table; into a pipe or file it is as wide as it needs to be, and plain (a notebook's kernel asks for colours)."""
    import sys

    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=140, color_system=None)
    console.print(renderable)


def counted(count: int, thing: str) -> str:
    """ "1 request", "2,000 requests"."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def progress() -> Any:
    """A progress bar on standard error that clears away when it is done and stays silent in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def in_steps(advance: Callable[[int], object], step: int = 100) -> Callable[[], None]:
    """A callback for something fast: every ``step`` calls it advances a progress bar, which costs more than the thing."""
    calls = 0

    def tick() -> None:
        nonlocal calls
        calls += 1
        if calls % step == 0:
            advance(step)

    return tick


def whole_numbers(text: str) -> list[int]:
    """The positive whole numbers of "1,2,3". RequestError for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"expected whole numbers separated by commas, not {text!r}") from None
    if min(numbers) < 1:
        raise RequestError(f"expected numbers of at least 1, not {min(numbers)}")
    return sorted(set(numbers))


def check_writable(path: str | None, endings: tuple[str, ...] = ()) -> None:
    """RequestError when ``path`` could not be written at the end of a long run: better said before it."""
    if not path:
        return
    if endings and Path(path).suffix.lower() not in endings:
        raise RequestError(f"cannot draw {path}: a figure's name ends in {', '.join(endings)}")
    if not Path(path).absolute().parent.is_dir():
        raise RequestError(f"cannot write {path}: there is no folder {Path(path).absolute().parent}")


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Write ``content`` to ``path``, if one was given."""
    if path:
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
