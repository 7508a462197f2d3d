"""python -m minikv.classroom release: what students get. The course, the engine and the exercises; no solution and no hidden check.

A list of what goes in, not of what stays out: a file that somebody adds to the repository tomorrow is not handed out by itself.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import minikv
from minikv.classroom import exercises
from minikv.classroom.build import BuildError, differences, sources
from minikv.classroom.exercises import Assignment

ROOT = Path(minikv.__file__).parent.parent
GOES_IN = (
    "README.md",
    "LICENSE",
    "requirements.txt",
    "pyproject.toml",
    "docs/*.png",
    "chapters/*.ipynb",
    "chapters/*.md",
    "exercises/*.ipynb",
)
PACKAGE = "minikv"
NOT_OF_THE_PACKAGE = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*.nbi", "*.nbc")


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
    for pattern in GOES_IN:
        for path in sorted(root.glob(pattern)):
            target = out / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.copytree(root / PACKAGE, out / PACKAGE, ignore=NOT_OF_THE_PACKAGE)
    return sorted(path for path in out.rglob("*") if path.is_file())


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
    print(f"{out}: {len(files)} files, {size / 1e6:.1f} MB, {notebooks} notebooks of exercises; no solutions, no hidden checks.")
    return 0
