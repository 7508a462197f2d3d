"""Where each published figure is computed again: read from the notebooks themselves, and written down as a page.

``claims.md`` beside the notebooks lists every row of ``CLAIMS`` with the cell that treats it. Nobody writes it by hand, so
it cannot promise an audit that is not there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minikv.classroom.claims import CLAIMS

PAGE = "claims.md"
HEAD = """# Every figure that was checked

The sources that the course grew from say things in numbers. Each is computed again in the chapter where it is met; a chapter
whose number does not come out does not build. This page is written by `python -m minikv.classroom build chapters`.
The sources: *the talk* is Khawaja Shams (Momento), "Serving LLMs at Scale: The Hidden KV Cache Advantage", QCon AI
Boston 2026; *the blog* is Sankalp Shubham, "How prompt caching works", 2025-11-30; *the explainer* is Avi Chawla,
"KV Caching in LLMs, clearly explained".

| chapter | who | says | verdict | computed in |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Audit:
    """One ``claim(name, ...)`` call: the notebook and the cell that it stands in, and the text that the cell shows."""

    claim: str
    notebook: Path
    cell: str
    shown: str

    @property
    def chapter(self) -> int | None:
        """The number that the notebook's name begins with."""
        number = self.notebook.name.split("_")[0]
        return int(number) if number.isdecimal() else None


def notebooks(folder: Path) -> list[Path]:
    """The notebooks of a folder, in order."""
    return sorted(folder.glob("*.ipynb"))


def read(path: Path) -> Any:
    """The notebook in ``path`` (nbformat 4)."""
    import nbformat

    return nbformat.read(path, as_version=4)


def calls(code: str, function: str) -> list[ast.Call]:
    """The calls of ``function`` by its bare name in a code cell."""
    return [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    ]


def shown_text(cell: Any) -> str:
    """All that the stored outputs of a code cell say in words."""
    parts = [output.get("text", "") for output in cell.outputs]
    parts += [str(value) for output in cell.outputs for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(filter(None, parts))


def audits(folder: Path) -> Iterator[Audit]:
    """Every ``claim`` call in the notebooks of ``folder`` that names its claim in so many words."""
    for path in notebooks(folder):
        for cell in read(path).cells:
            if cell.cell_type == "code":
                for call in calls(cell.source, "claim"):
                    if call.args and isinstance(call.args[0], ast.Constant):
                        yield Audit(str(call.args[0].value), path, cell.id, shown_text(cell))


def page(folder: Path) -> str:
    """``CLAIMS`` as a table, each row with a link to where it is treated. JupyterLab follows the link to the very cell."""
    where: dict[str, list[str]] = {name: [] for name in CLAIMS}
    for audit in audits(folder):
        if audit.claim in where and audit.chapter == CLAIMS[audit.claim].chapter:
            where[audit.claim].append(f"[{audit.cell}]({audit.notebook.name}#cell-id={audit.cell})")
    rows = [
        f"| {claim.chapter} | {claim.source_name.lower()} | {claim.says} | {claim.verdict} | {', '.join(where[name]) or 'to come'} |"
        for name, claim in sorted(CLAIMS.items(), key=lambda item: item[1].chapter)
    ]
    assert all(row.count("|") == 6 for row in rows), "a claim with a | in it would break the table"
    return HEAD + "\n".join(rows) + "\n"


def write_page(folder: Path) -> None:
    """Write the page, if the notebooks of ``folder`` treat any claim."""
    if next(audits(folder), None) is not None:
        (folder / PAGE).write_text(page(folder), encoding="utf-8")


def check_page(folder: Path) -> list[str]:
    """What is wrong with the page; empty when it says what the notebooks do."""
    if next(audits(folder), None) is None:
        return []
    path = folder / PAGE
    if not path.exists() or path.read_text(encoding="utf-8") != page(folder):
        return [f"{path} does not say what the notebooks do: build without naming notebooks to write it again"]
    return []
