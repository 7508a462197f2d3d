"""A learner's own copy of the chapters: outputs cleared, so that no prediction is spoiled, and never written over.

What is in the folder already is the learner's, whatever it is. A chapter that is new is added; one that the course has
rewritten since is named, and the learner decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import minikv
from minikv.errors import RequestError

CHAPTERS = Path(minikv.__file__).parent.parent / "chapters"
FIRST = "00_start_here.ipynb"


@dataclass
class Copied:
    """What ``copy_chapters`` did: files that were added, that were there already, and of those, what is not the course's any more."""

    folder: Path
    added: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    differing: dict[str, str] = field(default_factory=dict)

    def report(self) -> Iterator[str]:
        """What the learner should know, a line each."""
        if not self.kept:
            yield f"Your copy of the course is in {self.folder}: {len(self.added)} files, outputs cleared."
        else:
            yield f"Found your copy of the course in {self.folder}; nothing in it was changed."
            if self.added:
                yield f"New, and added: {', '.join(self.added)}."
        for name, why in self.differing.items():
            yield f"{name} {why}. Yours is kept as it is; to get the course's, rename or move yours and start again."


def copy_chapters(folder: Path, chapters: Path | None = None) -> Copied:
    """Copy the notebooks, outputs cleared, and the pages beside them into ``folder``, and overwrite nothing.

    RequestError when there are no chapters to copy, or ``folder`` cannot be written.
    """
    chapters = chapters or CHAPTERS
    originals = sorted([*chapters.glob("*.ipynb"), *chapters.glob("*.md")])
    if not any(original.name == FIRST for original in originals):
        raise RequestError(
            f"there are no chapters in {chapters}. They lie beside the package in a clone of the repository and are not installed with "
            f"it: run this from the clone, with minikv installed from there (pip install -r requirements.txt)"
        )
    if chapters.resolve() == folder.resolve():
        raise RequestError(f"{folder} holds the course itself, with its outputs; choose another folder to work in")
    copied = Copied(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for original in originals:
            mine = folder / original.name
            if mine.exists() or mine.is_symlink():
                copied.kept.append(original.name)
                if why := _difference(mine, original):
                    copied.differing[original.name] = why
            else:
                _write_new(mine, _cleared(original))
                copied.added.append(original.name)
    except (FileExistsError, NotADirectoryError):
        raise RequestError(f"{folder} is a file, or lies in one; choose another folder with --folder") from None
    except OSError as wrong:
        raise RequestError(f"{folder} cannot be worked in: {wrong.strerror or wrong}; choose another with --folder") from None
    return copied


def _cleared(original: Path) -> str:
    """The text of a page, or of a notebook without its outputs."""
    import nbformat

    if original.suffix != ".ipynb":
        return original.read_text(encoding="utf-8")
    notebook = nbformat.read(original, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(notebook) + "\n"


def _difference(mine: Path, original: Path) -> str:
    """Why the learner's file is not the course's any more; empty when it is. Whatever is done in the cells of a notebook does not count."""
    try:
        if original.suffix != ".ipynb":
            return "" if mine.read_text(encoding="utf-8") == original.read_text(encoding="utf-8") else "differs from the course's"
        return "" if _stamp(mine) == _stamp(original) else "has been rewritten since you copied it"
    except (OSError, ValueError, AttributeError):
        return "cannot be read"


def _stamp(notebook: Path) -> str | None:
    """The hash of the source that a notebook was built from."""
    return json.loads(notebook.read_text(encoding="utf-8")).get("metadata", {}).get("minikv", {}).get("source_sha256")


def _write_new(file: Path, text: str) -> None:
    """Write a file that is not there yet; nothing is left of it when that fails."""
    with file.open("x", encoding="utf-8") as opened:
        try:
            opened.write(text)
            opened.flush()
        except OSError:
            file.unlink()
            raise
