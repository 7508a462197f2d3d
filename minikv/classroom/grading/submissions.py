"""What was handed in: who it is from, which file counts, and which of its cells answer what.

A folder, files, or the zip of an LMS. Only answers are taken from a submission; everything else is ours. A cell is known by
its grade_id, then by its id, then by its text, then by the names that it defines, because metadata gets lost on the way.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from minikv.classroom.exercises import ANSWER_HERE, Assignment, Cell, names_bound

NOTEBOOK_BYTES = 20_000_000
MEMBERS = 10_000
ADDED_CELLS = 200
CODE_BYTES = 1_000_000


class SubmissionsError(Exception):
    """There is nothing to grade where we were told to look, and why."""


@dataclass(frozen=True)
class Handed:
    """A file that was handed in. ``path`` is relative to what was given; ``when`` only orders attempts."""

    who: str
    path: PurePosixPath
    content: bytes
    when: tuple[float, ...]
    others: int = 0  # how many more files came from the same person


# ---------------------------------------------------------------- finding


def find(given: Iterable[Path], assignment: Assignment) -> list[Handed]:
    """One file for each person, in alphabetical order: of several attempts the latest. SubmissionsError when there is none."""
    people: dict[str, list[Handed]] = {}
    given = list(given)
    names = [path.name for path in given]
    for path in given:
        found = list(_files(path))
        if path.is_file() and names.count(path.name) > 1:  # submissions/*/05_pages.ipynb: the folder says who
            found = [replace(each, path=PurePosixPath(path.parent.name, path.name)) for each in found]
        for handed in _without_wrapper(found):
            people.setdefault(identity(handed.path), []).append(replace(handed, who=identity(handed.path)))
    if not people:
        raise SubmissionsError(f"no submission in {', '.join(map(str, given))}: a folder, notebooks or the zip of an LMS is wanted")
    return [_latest(people[who], assignment.source.stem) for who in sorted(people, key=str.lower)]


def _files(path: Path) -> Iterator[Handed]:
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file() and not each.is_symlink())
        for each in found:
            relative = PurePosixPath(each.relative_to(path).as_posix())
            if not _ignored(relative):
                yield _handed(relative, _read(each), (each.stat().st_mtime,))
    elif path.suffix.lower() == ".zip":
        yield from _members(path)
    elif path.is_file():
        yield _handed(PurePosixPath(path.name), _read(path), (path.stat().st_mtime,))
    else:
        raise SubmissionsError(f"{path} does not exist")


def _without_wrapper(found: list[Handed]) -> list[Handed]:
    """Without a folder that holds everything: somebody has packed the folder of the submissions, not its content."""
    paths = [each.path for each in found]
    if len(paths) < 2 or len({path.parts[0] for path in paths}) > 1:
        return found
    deeper = all(len(path.parts) > 2 and not _ATTEMPT.fullmatch(path.parts[1]) for path in paths)
    side_by_side = all(len(path.parts) == 2 for path in paths) and len({path.stem for path in paths}) == len(paths)
    if not deeper and not side_by_side:
        return found
    return _without_wrapper([replace(each, path=PurePosixPath(*each.path.parts[1:])) for each in found])


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(NOTEBOOK_BYTES + 1)


def _members(path: Path) -> Iterator[Handed]:
    """The files in a zip. Nothing is extracted, so that no member can be written elsewhere; none is read beyond its limit."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist()[:MEMBERS]:
                relative = PurePosixPath(member.filename.replace("\\", "/"))
                relative = PurePosixPath(*[part for part in relative.parts if part not in ("/", "..", ".")])
                if not member.is_dir() and not _ignored(relative):
                    try:
                        with archive.open(member) as file:
                            content = file.read(NOTEBOOK_BYTES + 1)
                    except (RuntimeError, zipfile.BadZipFile, NotImplementedError, OSError, EOFError):
                        content = b""  # encrypted or damaged: unreadable, like any other file that is no notebook
                    yield _handed(relative, content, member.date_time)
    except (zipfile.BadZipFile, OSError) as wrong:
        raise SubmissionsError(f"{path} is no zip that can be read: {wrong}") from None


def _ignored(path: PurePosixPath) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in path.parts) or path.name in ("Thumbs.db", "desktop.ini")


def _handed(path: PurePosixPath, content: bytes, when: tuple[float, ...]) -> Handed:
    return Handed(identity(path), path, content, (*_attempt(path), *when))


_MOODLE = re.compile(r"^(?P<who>.+?_\d+)_assignsubmission_(?:file|onlinetext)_?")
_CANVAS = re.compile(r"^(?P<who>[^_]+?)(?:_LATE)?_(?P<user>\d+)_\d+_")
_ATTEMPT = re.compile(r"(?:attempt|versuch|submission)[ _-]*(\d+)", re.IGNORECASE)
_AGAIN = re.compile(r"[-_ ]\(?(\d{1,3})\)?$")


def identity(path: PurePosixPath) -> str:
    """Who handed ``path`` in: the outermost folder that is no attempt's, or the prefix that an LMS gives, or the name without attempt."""
    for part in (*path.parts[:-1], path.name):
        for pattern in (_MOODLE, _CANVAS):
            if found := pattern.match(part):
                return "_".join(found.groups())
    folders = [part for part in path.parts[:-1] if not _ATTEMPT.fullmatch(part)]
    return folders[0] if folders else path.stem


def _attempt(path: PurePosixPath) -> tuple[float, float]:
    """The number of the attempt, from a folder's name or from what an LMS hangs on the file's: notebook-2.ipynb."""
    folder = max((int(found[1]) for part in path.parts[:-1] if (found := _ATTEMPT.search(part))), default=0)
    again = _AGAIN.search(path.stem) if len(path.parts) > 1 or _CANVAS.match(path.name) else None
    return float(folder), float(again[1]) if again else 0.0


def _latest(handed: list[Handed], stem: str) -> Handed:
    """The notebook that counts: one with the assignment's name before others, then the latest."""
    notebooks = [each for each in handed if each.path.suffix.lower() == ".ipynb"]
    named = [each for each in notebooks if stem.lower() in each.path.name.lower()]
    chosen = max(named or notebooks or handed, key=lambda each: (each.when, str(each.path)))
    return Handed(chosen.who, chosen.path, chosen.content, chosen.when, len(handed) - 1)


# ---------------------------------------------------------------- reading


class Unreadable(Exception):
    """The file is no notebook, and why."""


@dataclass(frozen=True)
class Theirs:
    """A cell as it was handed in."""

    kind: str
    source: str
    grade_id: str
    id: str
    tags: tuple[str, ...]


def read(content: bytes) -> tuple[list[Theirs], str]:
    """The cells of a notebook, also of an old or damaged one, and the hash of the source that it says it was built from."""
    if len(content) > NOTEBOOK_BYTES:
        raise Unreadable(f"larger than {NOTEBOOK_BYTES:,} bytes")
    try:
        loaded = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise Unreadable("not a notebook: it is no JSON" if content.strip() else "empty") from None
    if not isinstance(loaded, dict):
        raise Unreadable("not a notebook: JSON of another kind")
    cells = loaded.get("cells")
    if cells is None and isinstance(loaded.get("worksheets"), list):  # nbformat 3
        cells = [cell for sheet in loaded["worksheets"] if isinstance(sheet, dict) for cell in _list(sheet.get("cells"))]
    if not isinstance(cells, list):
        raise Unreadable("not a notebook: it has no cells")
    stamp = _dict(_dict(loaded.get("metadata")).get("minikv")).get("source_sha256")
    return [_theirs(cell) for cell in cells if isinstance(cell, dict)], stamp if isinstance(stamp, str) else ""


def _theirs(cell: dict[str, Any]) -> Theirs:
    metadata = _dict(cell.get("metadata"))
    source = cell.get("source", cell.get("input", ""))  # nbformat 3 calls it input
    text = "".join(map(str, source)) if isinstance(source, list) else str(source)
    tags = tuple(_writable(tag) for tag in _list(metadata.get("tags")))
    grade_id = _dict(metadata.get("nbgrader")).get("grade_id", "")
    text = _writable(text).replace("\r\n", "\n")
    return Theirs(_writable(cell.get("cell_type")), text, _writable(grade_id), _writable(cell.get("id", "")), tags)


def _writable(value: Any) -> str:
    """The text of ``value`` as a file can hold it: JSON may spell half a character, which nothing can write."""
    return str(value).encode("utf-8", "replace").decode()


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# ---------------------------------------------------------------- matching


@dataclass
class Work:
    """What is taken from a submission: answers by the name of their cell, and cells that the learner added, by the cell before them."""

    answers: dict[str, list[str]] = field(default_factory=dict)
    prose: dict[str, str] = field(default_factory=dict)  # answers in words, graded by hand
    added: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    tampered: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


SKIPS = ("nbval-skip", "raises-exception", "nbval-raises-exception", "skip-execution")
_MARKER = re.compile(r"^[ \t]*#+[ \t]*(NBVAL_\w+|PYTEST_VALIDATE_\w+)[ \t]*$", re.MULTILINE)


def match(theirs: list[Theirs], assignment: Assignment) -> Work:
    """Sort the cells of a submission. Checks and given cells that were changed are noted, and count for nothing."""
    work, known = Work(), {cell.id: cell for cell in assignment.cells}
    seen: dict[str, list[str]] = {}
    here = assignment.cells[0].id
    for cell in theirs:
        ours = _ours(cell, assignment, known)
        if ours is None:
            if cell.kind == "code" and cell.source.strip():
                work.added.append((here, _unmarked(cell.source, work)))
            continue
        here = ours.id
        if ours.learners:
            _take_answer(cell, ours, work)
        elif ours.role is not None:
            seen.setdefault(ours.id, []).append(cell.source)
            if any(tag.lower() in SKIPS for tag in cell.tags):
                work.tampered.append(f"{ours.id} was marked to be skipped")
    _compare(seen, assignment, work)
    _limit(work)
    return work


def _ours(cell: Theirs, assignment: Assignment, known: dict[str, Cell]) -> Cell | None:
    for name in (cell.grade_id, cell.id):
        if name in known:
            return known[name]
    text = _bare(cell.source)
    for each in assignment.cells:
        if each.kind == cell.kind and text and text in (_bare(each.stub), ANSWER_HERE if each.role == "manual" else ""):
            return each
    if cell.kind != "code":
        return None
    code = [each for each in assignment.cells if each.kind == "code"]
    bound = names_bound(cell.source)
    return next((each for each in code if each.role == "answer" and bound and names_bound(each.stub) & bound), None)


def _bare(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _take_answer(cell: Theirs, ours: Cell, work: Work) -> None:
    if cell.kind == "code" and ours.kind == "code":
        work.answers.setdefault(ours.id, []).append(_unmarked(cell.source, work))
    elif ours.kind == "markdown":
        if _bare(cell.source) not in (_bare(ours.stub), ANSWER_HERE):
            work.prose[ours.id] = "\n\n".join(filter(None, (work.prose.get(ours.id), cell.source)))
        else:
            work.prose.setdefault(ours.id, "")
    else:
        work.notes.append(f"{ours.id} is no code cell any more")


def _unmarked(source: str, work: Work) -> str:
    """Without the comments by which nbval would skip a cell."""
    if _MARKER.search(source):
        work.notes.append("a cell is marked for nbval")
    return _MARKER.sub("# (a mark for nbval stood here)", source)


def _compare(seen: dict[str, list[str]], assignment: Assignment, work: Work) -> None:
    for cell in assignment.of("given", "check"):
        if cell.id not in seen:
            work.tampered.append(f"{cell.id} was deleted")
        elif all(_bare(text) in (_bare(cell.stub), _bare(cell.whole)) for text in seen[cell.id]):
            if _bare(cell.stub) != _bare(cell.whole) == _bare(seen[cell.id][0]):
                work.notes.append(f"{cell.id} is that of the solutions")
        else:
            work.tampered.append(f"{cell.id} was changed")
    for cell in assignment.of("answer", "manual"):
        if cell.id not in work.answers and cell.id not in work.prose:
            work.missing.append(cell.id) if cell.role == "answer" else work.notes.append(f"{cell.id} was not found: look for it")


def _limit(work: Work) -> None:
    if len(work.added) > ADDED_CELLS or sum(len(code) for _, code in work.added) > CODE_BYTES:
        work.notes.append(f"{len(work.added)} added cells were left out: too many")
        work.added = []
    for name, parts in work.answers.items():
        if sum(map(len, parts)) > CODE_BYTES:
            work.notes.append(f"{name} was left out: longer than {CODE_BYTES:,} characters")
            work.answers[name] = []
