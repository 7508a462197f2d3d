"""python -m minikv.classroom release: what students get. The course, the engine and the exercises; no solution and no hidden check.

A list of what goes in, not of what stays out: a file that somebody adds to the repository tomorrow is not handed out by itself.
Of ``minikv.classroom`` only that goes in which notebooks import: whoever has no grader need not read how it guards itself.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import minikv
from minikv.classroom import exercises
from minikv.classroom.build import BuildError, differences, sources
from minikv.classroom.exercises import Assignment

ROOT = Path(minikv.__file__).parent.parent
README = "exercises/students.md"
"""Becomes the bundle's README.md."""
GOES_IN = ("LICENSE", "requirements.txt", "pyproject.toml", "chapters/*.ipynb", "chapters/*.md", "exercises/*.ipynb")
PACKAGE = "minikv"
NOT_OF_THE_PACKAGE = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*.nbi", "*.nbc")
OF_THE_CLASSROOM = ("__init__.py", "checks.py", "claims.py", "notebook.py", "words.py", "working_copy.py", "explorers", "jupyter")
OF_THE_PROJECT = ("[build-system]", "[project]", "[tool.setuptools")
"""The tables of pyproject.toml that pip needs: not those for tests and tools."""
FOR_AUTHORS = re.compile(r"\s+This page is written by `python -m minikv\.classroom [^`]+`\.")


class ReleaseError(Exception):
    """There is something in the way of handing out the exercises."""


def release(out: Path, root: Path | None = None) -> list[Path]:
    """Write the students' bundle to the folder ``out``, which must be new or empty; the files in it.

    ReleaseError, with nothing written, when a notebook of exercises is not what its source makes of it, or would show a solution.
    """
    root = root or ROOT
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ReleaseError(f"{out} is there already; name a new folder")
    assignments = [exercises.read(source) for source in _exercises(root)]
    for fault in (fault for assignment in assignments for fault in _faults(assignment)):
        raise ReleaseError(fault)
    known = {exercises.stub_path(assignment.source) for assignment in assignments}
    for stray in sorted(set((root / "exercises").glob("*.ipynb")) - known):
        raise ReleaseError(f"{stray} comes from no source; move it away")
    for path in (path for pattern in GOES_IN for path in sorted(root.glob(pattern))):
        _hand_out(path, out / path.relative_to(root))
    _hand_out(root / README, out / "README.md")
    shutil.copytree(root / PACKAGE, out / PACKAGE, ignore=_not_for_students(root / PACKAGE / "classroom"))
    return sorted(path for path in out.rglob("*") if path.is_file())


def _hand_out(path: Path, target: Path) -> None:
    """Copy a file; without what in it is for authors."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".md":
        target.write_text(FOR_AUTHORS.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")
    elif path.name == "pyproject.toml":
        tables = re.split(r"^(?=\[[\w.\-]+\]|\[\[)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        target.write_text("".join(table for table in tables if table.startswith(OF_THE_PROJECT)).rstrip() + "\n", encoding="utf-8")
    else:
        shutil.copyfile(path, target)


def _not_for_students(classroom: Path) -> Callable[[str, list[str]], set[str]]:
    """For ``shutil.copytree``: what of a folder of the package stays here."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        teachers = set(names) - set(OF_THE_CLASSROOM) if Path(folder) == classroom else set()
        return teachers | set(NOT_OF_THE_PACKAGE(folder, names))

    return left_out


def _exercises(root: Path) -> list[Path]:
    try:
        return [source for source in sources(root / "exercises") if exercises.is_exercise(source)]
    except BuildError as wrong:
        raise ReleaseError(f"{wrong}. A release is made from a clone of the repository") from None


def _faults(assignment: Assignment) -> Iterator[str]:
    """Whether the notebook is out of date, or holds a line of a solution or of a hidden test that the learner was not to see."""
    path = exercises.stub_path(assignment.source)
    yield from differences(path, exercises.notebook(assignment, solved=False), assignment.source, executed=False)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for marker in ("### BEGIN", "### END", "### STUB"):
        if marker in text:
            yield f"{path.name} holds {marker!r}"


def command(out: Path) -> int:
    """The subcommand; its exit status."""
    try:
        files = release(out)
    except (ReleaseError, BuildError) as wrong:
        print(wrong, file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in files)
    notebooks = sum(path.parent.name == "exercises" for path in files)
    print(f"{out}: {len(files)} files, {size / 1e6:.1f} MB, {notebooks} notebooks of exercises; no solutions, no hidden checks, no grader.")
    return 0
