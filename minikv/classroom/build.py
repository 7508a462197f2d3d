"""Notebooks from their sources: built, executed, and held against the source ever after.

People edit ``chapters/source/NN_name.py`` (jupytext's percent format: a ``# %%`` line begins a cell). ``build`` turns each
into ``chapters/NN_name.ipynb``, runs it from top to bottom and keeps the outputs, so that the course can be read without
being run. The notebook carries the hash of its source; ``check`` says where notebook, source and engine have come apart.

A cell says its name with ``id="..."`` on its first line: the name is its id in the notebook, and a cell that has none
is called after the one before it. Names are what links, graders and tests go by, so they outlive edits.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minikv.classroom.audits import shown_text
from minikv.classroom.notebook import PREDICTIONS, source_of
from minikv.show.widgets import WIDGET_VIEW

CHECKED = "nbval-check-output"
FOLDED = "hide-input"  # code that only draws: JupyterLab shows a bar in its place, a click unfolds it
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


class BuildError(Exception):
    """A source that cannot become a notebook, and why."""


@dataclass(frozen=True)
class Built:
    """A notebook that was built: where it lies, how long its cells took, and the most memory that any kernel used so far."""

    path: Path
    seconds: float
    peak_bytes: int


def sources(folder: Path) -> list[Path]:
    """The sources of a folder's notebooks, in order. BuildError when there is none."""
    found = sorted((folder / "source").glob("*.py"))
    if not found:
        raise BuildError(f"there is no source to build in {folder / 'source'}")
    return found


def target(source: Path) -> Path:
    """Where the notebook of ``source`` lies."""
    return source.parent.parent / f"{source.stem}.ipynb"


def sha256(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


def read(source: Path, known: frozenset[str] = frozenset({"tags"})) -> Any:
    """The notebook of ``source`` without outputs; cells may have the ``known`` metadata. BuildError for two of one name and the like."""
    import jupytext

    notebook = jupytext.read(source, fmt="py:percent")
    names: set[str] = set()
    last, follower = "start", 1
    for cell in notebook.cells:
        cell.metadata.pop("lines_to_next_cell", None)  # jupytext's note of how many empty lines followed
        name = cell.metadata.pop("id", None)
        if name is None:
            if cell.cell_type == "code":
                raise BuildError(f'{source.name}: a code cell has no name; write # %% id="..." above {cell.source[:60]!r}')
            follower += 1
            name = f"{last}-{follower}"
        else:
            last, follower = name, 1
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
            raise BuildError(f"{source.name}: {name!r} is no name for a cell: letters, digits, - and _, at most 64")
        if name in names:
            raise BuildError(f"{source.name}: two cells are called {name!r}")
        names.add(name)
        cell.id = name
        if cell.metadata.keys() - known:
            allowed = " and ".join(["id", *sorted(known)])
            raise BuildError(f"{source.name}, cell {name}: only {allowed} are known, not {sorted(cell.metadata.keys() - known)}")
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if FOLDED in cell.metadata.get("tags", ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
    notebook.metadata = type(notebook.metadata)(KERNEL)
    notebook.metadata["minikv"] = {"source": f"source/{source.name}", "source_sha256": sha256(source)}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def build(source: Path, cell_timeout_s: int = 120) -> Built:
    """Build and execute the notebook of ``source`` and write it. BuildError, with nothing written, when a cell fails.

    The kernel is a fresh one, in the notebook's folder.
    """
    import nbformat

    notebook = read(source)
    seconds = execute(notebook, source.parent.parent, source.name, cell_timeout_s)
    nbformat.write(notebook, target(source))
    return Built(target(source), seconds, peak_bytes_of_kernels())


def execute(notebook: Any, here: Path, name: str, cell_timeout_s: int) -> float:
    """Run ``notebook`` in the folder ``here`` and keep its outputs, settled; the seconds that it took. BuildError when a cell fails."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    if (here / PREDICTIONS).exists():
        raise BuildError(f"{here / PREDICTIONS} holds guesses, which would be stored in the outputs: move it away")
    metadata = {**notebook.metadata}  # a kernel adds its version to it
    client = NotebookClient(
        notebook,
        timeout=cell_timeout_s,
        kernel_name="python3",
        coalesce_streams=True,  # what a cell prints is one output, however the kernel sent it
        extra_arguments=["--log-level=ERROR"],  # without it each kernel warns that loopback is not encrypted
        resources={"metadata": {"path": str(here)}},
    )
    started = time.perf_counter()
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as wrong:
        raise BuildError(f"{name}: {wrong}") from None
    seconds = time.perf_counter() - started
    notebook.metadata = metadata
    for cell in notebook.cells:
        if cell.cell_type == "code":
            _settle(cell, f"{name}, cell {cell.id}", here)
    nbformat.validate(notebook)
    return seconds


def peak_bytes_of_kernels() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such count
        return 0
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _settle(cell: Any, where: str, here: Path) -> None:
    """Make the outputs of ``cell`` such as can be kept: no clock, no live widget, no folder of this machine, no warning."""
    cell.metadata = {name: value for name, value in cell.metadata.items() if name in ("tags", "jupyter", "nbgrader")}
    kept = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            raise BuildError(f"{where} writes to stderr: {output.text[:300]!r}")
        data = output.get("data")
        if data is None:
            kept.append(output)
            continue
        live = data.pop(WIDGET_VIEW, None)
        kept.append(output)
        if "image/png" in data:
            image = data["image/png"]
            data["image/png"] = base64.b64encode(base64.b64decode(image)).decode() + "\n"
            if live is not None:  # a still picture shows no text of its own: the sentence goes below it
                if CHECKED in cell.metadata.get("tags", ()):
                    raise BuildError(f"{where} is tagged {CHECKED}, but its widget is kept as a picture: no run gives these outputs")
                kept.append(type(output)(output_type="display_data", metadata={}, data={"text/markdown": data["text/plain"]}))
    cell.outputs = kept
    text = shown_text(cell)
    for folder in sorted({str(folder) for folder in (Path.home(), Path.cwd(), here.resolve(), tempfile.gettempdir())} - {"/"}):
        if f"{folder}/" in text:
            raise BuildError(f"{where} shows a folder of this machine ({folder}): {text[max(0, text.find(folder) - 80) :][:200]!r}")
    if CHECKED in cell.metadata.get("tags", ()) and not kept:
        raise BuildError(f"{where} is tagged {CHECKED} and has no output: nbval would check nothing")


def check(source: Path) -> list[str]:
    """What has come apart between ``source``, its notebook and the engine that it shows; empty when nothing has."""
    return differences(target(source), read(source), source)


def differences(path: Path, wanted: Any, source: Path, executed: bool = True) -> list[str]:
    """What has come apart between the notebook in ``path`` and the one ``wanted`` by ``source``."""
    import nbformat

    if not path.exists():
        return [f"{path.name} has not been built from {source.name}"]
    built: Any = nbformat.read(path, as_version=4)
    faults = []
    if built.metadata.get("minikv", {}).get("source_sha256") != sha256(source):
        faults.append(f"{path.name}: its outputs are those of an older {source.name}")
    for have, want in zip(built.cells, wanted.cells, strict=False):
        same = (have.id, have.cell_type, have.source) == (want.id, want.cell_type, want.source)
        if not same or any((have.metadata.get(kind) or None) != (want.metadata.get(kind) or None) for kind in ("tags", "nbgrader")):
            faults.append(f"{path.name}, cell {have.id}: differs from cell {want.id} of the source")
            break
    if len(built.cells) != len(wanted.cells):
        faults.append(f"{path.name}: {len(built.cells)} cells, but {len(wanted.cells)} in the source")
    for cell in built.cells if executed else ():
        if cell.cell_type == "code":
            if cell.execution_count is None:
                faults.append(f"{path.name}, cell {cell.id}: was not executed")
            faults += [f"{path.name}, cell {cell.id}: {fault}" for output in cell.outputs for fault in _output_faults(output)]
    return faults


def _output_faults(output: Any) -> list[str]:
    if output.output_type == "error":
        return [f"holds an error: {output.ename}"]
    shown = output.get("metadata", {}).get("minikv", {})
    if "source_of" in shown:
        try:
            current = hashlib.sha256(source_of(shown["source_of"]).encode()).hexdigest()
        except (ImportError, AttributeError, OSError):
            return [f"shows {shown['source_of']}, which is no more"]
        if current != shown["sha256"]:
            return [f"shows an older {shown['source_of']}"]
    return []
