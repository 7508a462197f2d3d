"""Points: from verdicts to a row of a table, and what a teacher changes about them.

A row can be graded again and again: ``--overrides`` are laid over what was computed each time, ``--void`` takes a check out for
everyone, and ``--previous`` says whose total has changed.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import minikv
from minikv.classroom.exercises import Assignment
from minikv.classroom.grading.run import Ran, Verdict
from minikv.classroom.grading.submissions import Handed, Work
from minikv.classroom.grading.suspicion import flags

NOT_GRADED = "not graded"
"""The status of a submission that the grader, or the machine, failed to run: it has no points, not 0."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")


class MarksError(Exception):
    """A file of overrides or old marks, or the name of a check, that cannot be used, and why."""


@dataclass
class Mark:
    """One submission graded."""

    who: str
    path: str
    status: str  # ok, partial, unreadable, tampered or not graded
    points: dict[int, float] = field(default_factory=dict)  # by exercise; automatic ones
    maximum: int = 0
    look_at: list[str] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)  # what the learner should know besides

    @property
    def total(self) -> float:
        return sum(self.points.values())


def maximum(assignment: Assignment, void: Iterable[str] = ()) -> int:
    """The most that checks can give."""
    return sum(cell.points for cell in assignment.of("check") if cell.id not in set(void))


def unreadable(assignment: Assignment, handed: Handed, why: str, void: Iterable[str]) -> Mark:
    """Of a file that is no notebook: no points, and a line that says so."""
    return Mark(
        handed.who, str(handed.path), "unreadable", dict.fromkeys(_graded(assignment), 0.0), maximum(assignment, void), [why], told=[why]
    )


def mark(assignment: Assignment, handed: Handed, work: Work, ran: Ran, void: Iterable[str], stale: bool) -> Mark:
    """Add up what the checks have given."""
    left_out = set(void)
    points = dict.fromkeys(_graded(assignment), 0.0)
    for cell in assignment.of("check"):
        if cell.exercise and cell.id not in left_out and cell.id in ran.verdicts and ran.verdicts[cell.id].passed:
            points[cell.exercise] += cell.points
    told = _told(work, ran)
    tampered = [*work.tampered, *(f"{name}: the token of the check was printed too early" for name in ran.forged)]
    undecided = [cell.id for cell in assignment.of("check") if cell.id not in ran.verdicts]
    partial = ran.taken_out or ran.broken or work.missing or undecided
    look_at = [*tampered, *told, *(f"{name} was not decided" for name in undecided), *flags(work, assignment)]
    if handed.others:
        look_at.append(f"{handed.others} more file{'s' if handed.others > 1 else ''} from the same person")
    if stale:
        look_at.append("made from another version of the exercises")
    status = "tampered" if tampered else "partial" if partial else "ok"
    return Mark(handed.who, str(handed.path), status, points, maximum(assignment, void), look_at, ran.verdicts, told)


def _graded(assignment: Assignment) -> list[int]:
    return [exercise.number for exercise in assignment.exercises]


def _told(work: Work, ran: Ran) -> list[str]:
    return [
        *(f"{name} was taken out: it {why}" if why.startswith(("ended", "did", "printed")) else f"{name} was taken out: {why}"
          for name, why in ran.taken_out.items()),
        *(f"{name} raised {said.splitlines()[0][:150]}" for name, said in ran.broken.items()),
        *(f"{name} was not found" for name in work.missing), *work.notes, *ran.notes,
    ]  # fmt: skip


def version(assignment: Assignment) -> str:
    """What was graded with: the hash of the source, and minikv's version."""
    return f"{hashlib.sha256(assignment.source.read_bytes()).hexdigest()[:12]} minikv {minikv.__version__}"


# ---------------------------------------------------------------- what a teacher changes


@dataclass(frozen=True)
class Override:
    """A person's decision about one exercise of one submission."""

    points: float
    reason: str


def read_overrides(path: Path, assignment: Assignment) -> dict[tuple[str, int], Override]:
    """From a CSV with the columns submission, exercise, points, reason. MarksError for a line that fits nothing."""
    overrides = {}
    for number, row in enumerate(_rows(path, ("submission", "exercise", "points")), 2):
        try:
            exercise, points = int(row["exercise"]), float(row["points"])
            if not 0 <= points < float("inf"):
                raise ValueError
        except (TypeError, ValueError):
            raise MarksError(f"{path}, line {number}: exercise is a whole number, points a number from 0 on") from None
        if exercise not in _graded(assignment):
            raise MarksError(f"{path}, line {number}: there is no exercise {exercise}")
        overrides[row["submission"].removeprefix("'"), exercise] = Override(points, row.get("reason") or "no reason given")
    return overrides


def apply(overrides: Mapping[tuple[str, int], Override], marks: Iterable[Mark]) -> list[str]:
    """Lay the overrides over the marks; those that fit no submission are named."""
    by_name = {each.who: each for each in marks}
    unused = []
    for (who, exercise), override in overrides.items():
        if who not in by_name:
            unused.append(f"the override for {who}, exercise {exercise}, fits no submission")
            continue
        mark = by_name[who]
        mark.look_at.append(f"exercise {exercise}: {mark.points[exercise]:g} -> {override.points:g} ({override.reason})")
        mark.points[exercise] = override.points
    return unused


def changes(path: Path, marks: Iterable[Mark]) -> list[str]:
    """Whose total is another than in an older CSV, and who is new or gone."""
    before = {row["submission"].removeprefix("'"): row["total"] for row in _rows(path, ("submission", "total"))}
    now = {each.who: f"{each.total:g}" for each in marks}
    told = [f"{who}: {before[who]} -> {now[who]}" for who in now if who in before and before[who] != now[who]]
    told += [f"{who}: new, {now[who]}" for who in now if who not in before]
    return told + [f"{who}: had {before[who]} and is missing now" for who in before if who not in now]


def by_hand(path: Path) -> dict[str, str]:
    """What a person has written into the column for work graded by hand of an older CSV, by submission."""
    rows = _rows(path, ("submission",))
    column = next((name for name in rows[0] if name and name.startswith("by hand")), None) if rows else None
    return {row["submission"].removeprefix("'"): row[column] or "" for row in rows} if column else {}


def _rows(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as wrong:
        raise MarksError(f"{path} cannot be read: {wrong}") from None
    first = text.partition("\n")[0]
    reader = csv.DictReader(text.splitlines(), delimiter=";" if first.count(";") > first.count(",") else ",")  # as Excel likes it
    if missing := [name for name in needed if name not in (reader.fieldnames or ())]:
        raise MarksError(f"{path} has no column {', '.join(missing)}")
    return list(reader)


def check_void(void: Iterable[str], assignment: Assignment) -> None:
    """MarksError for a name that is no check's."""
    known = {cell.id for cell in assignment.of("check")}
    if unknown := sorted(set(void) - known):
        raise MarksError(f"no check is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")


# ---------------------------------------------------------------- the table


def write_csv(path: Path, assignment: Assignment, marks: Iterable[Mark], void: Iterable[str], by_hand: Mapping[str, str]) -> None:
    """One row a submission, for a spreadsheet: UTF-8 with a BOM, and nothing in it is taken for a formula. Written whole or not at all."""
    most_by_hand = sum(cell.points for cell in assignment.of("manual"))
    exercises = [f"{exercise.number} {exercise.title}" for exercise in assignment.exercises]
    manual = f"by hand (of {most_by_hand})" if most_by_hand else "by hand"
    header = ["submission", *exercises, "total", "maximum", manual, "status", "look at", "file", "source version", "void"]
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(map(_cell, header))
        for each in marks:
            graded = each.status != NOT_GRADED
            points = [f"{each.points[exercise.number]:g}" if graded else "" for exercise in assignment.exercises]
            row = [
                each.who,
                *points,
                f"{each.total:g}" if graded else "",
                each.maximum,
                by_hand.get(each.who, ""),
                each.status,
                "; ".join(each.look_at),
                each.path,
            ]
            writer.writerow(map(_cell, [*row, version(assignment), " ".join(void)]))
    beside.replace(path)


def _cell(value: object) -> str:
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return f"'{text}" if text.startswith(FORMULA) else text
