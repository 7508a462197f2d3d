"""Points: from verdicts to a row of a table, and what a teacher changes about them.

A row can be graded again and again: ``--overrides`` are laid over what was computed each time, ``--void`` takes a check out for
everyone, and ``--previous`` says whose total has changed.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import minikv
from minikv.classroom.exercises import Assignment
from minikv.classroom.grading.rebound import rebound
from minikv.classroom.grading.run import Ran, Verdict
from minikv.classroom.grading.submissions import Handed, Work
from minikv.classroom.grading.suspicion import flags
from minikv.classroom.words import counted

NOT_GRADED = "not graded"
"""The status of a submission that the grader, or the machine, failed to run: it has no points, not 0."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")


class MarksError(Exception):
    """A file of overrides or old marks, the name of a check, or an exercise without points, that cannot be used, and why."""


@dataclass(frozen=True)
class Override:
    """A person's decision about one exercise of one submission."""

    points: float
    reason: str  # the learner reads it


@dataclass
class Mark:
    """One submission graded."""

    who: str
    path: str
    status: str  # ok, partial, unreadable, tampered or not graded
    points: dict[int, float] = field(default_factory=dict)  # by exercise: what the checks gave, or a person decided
    most: dict[int, int] = field(default_factory=dict)  # by exercise: what its checks can give, without those that are void
    overrides: dict[int, Override] = field(default_factory=dict)  # by exercise
    void: dict[str, int | None] = field(default_factory=dict)  # checks that count for nobody, with their exercise
    look_at: list[str] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)  # what the learner should know besides

    @property
    def total(self) -> float:
        return sum(self.points.values())

    @property
    def maximum(self) -> int:
        """The most that the checks can give in all."""
        return sum(self.most.values())


def check_graded(assignment: Assignment) -> None:
    """MarksError when nothing in these exercises has points."""
    if not assignment.graded:
        raise MarksError(
            f"{assignment.source.name} is ungraded: its checks tell right from wrong and give no points, so there is nothing to grade. "
            f"Who wants to know how far they are runs them: pytest --nbval-lax exercises/{assignment.source.stem}.ipynb"
        )


def unreadable(assignment: Assignment, handed: Handed, why: str, void: Iterable[str]) -> Mark:
    """Of a file that is no notebook: no points, and a line that says so."""
    return _nothing_yet(assignment, handed, "unreadable", void, look_at=[why], told=[why])


def _nothing_yet(assignment: Assignment, handed: Handed, status: str, void: Iterable[str], **more: Any) -> Mark:
    """A mark with no points in any exercise that could give some."""
    left_out = {cell.id: cell.exercise for cell in assignment.of("check") if cell.id in set(void)}
    most = {
        exercise.number: sum(
            cell.points for cell in assignment.of("check") if cell.exercise == exercise.number and cell.id not in left_out
        )
        for exercise in assignment.graded
    }  # fmt: skip
    return Mark(handed.who, str(handed.path), status, dict.fromkeys(most, 0.0), most, void=left_out, **more)


def mark(assignment: Assignment, handed: Handed, work: Work, ran: Ran, void: Iterable[str], stale: bool) -> Mark:
    """Add up what the checks have given."""
    told = _told(work, ran)
    tampered = [*work.tampered, *(f"{name}: the token of the check was printed too early" for name in ran.forged)]
    undecided = [cell.id for cell in assignment.of("check") if cell.id not in ran.verdicts]
    partial = ran.taken_out or ran.broken or work.missing or undecided
    look_at = [*tampered, *told, *(f"{name} was not decided" for name in undecided), *flags(work, assignment)]
    look_at += rebound(work, assignment)
    if handed.others:
        look_at.append(f"{counted(handed.others, 'more file')} from the same person")
    if stale:
        look_at.append("made from another version of the exercises")
    status = "tampered" if tampered else "partial" if partial else "ok"
    mark = _nothing_yet(assignment, handed, status, void, look_at=look_at, verdicts=ran.verdicts, told=told)
    for cell in assignment.of("check"):
        if cell.exercise in mark.points and cell.id not in mark.void and cell.id in ran.verdicts and ran.verdicts[cell.id].passed:
            mark.points[cell.exercise] += cell.points
    return mark


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
        if exercise not in {each.number for each in assignment.graded}:
            raise MarksError(f"{path}, line {number}: there is no exercise {exercise} with points")
        overrides[row["submission"].removeprefix("'"), exercise] = Override(points, row.get("reason") or "no reason given")
    return overrides


def apply(overrides: Mapping[tuple[str, int], Override], marks: Iterable[Mark]) -> list[str]:
    """Lay the overrides over the marks. What the teacher should know of them, a line each: those that fit no submission, give more
    than the exercise has, or hide that a check is void, since an override stands for the whole exercise.
    """
    by_name = {each.who: each for each in marks}
    told = []
    for (who, exercise), override in overrides.items():
        if who not in by_name:
            told.append(f"the override for {who}, exercise {exercise}, fits no submission")
            continue
        mark = by_name[who]
        said = f"exercise {exercise}: {mark.points[exercise]:g} -> {override.points:g} ({override.reason})"
        told += [f"the override for {who}, exercise {exercise}, {doubt}" for doubt in _doubts(override, exercise, mark)]
        if override.points > mark.most[exercise]:
            said += f", more than its {counted(mark.most[exercise], 'point')}"
        mark.look_at.append(said)
        mark.points[exercise], mark.overrides[exercise] = override.points, override
    return told


def _doubts(override: Override, exercise: int, mark: Mark) -> Iterator[str]:
    most = counted(mark.most[exercise], "point")
    if override.points > mark.most[exercise]:
        yield f"gives {counted(override.points, 'point')}, but its checks can give only {most}; it counts as it is"
    if void := [name for name, number in mark.void.items() if number == exercise]:
        yield f"stands for the whole exercise, so that {' and '.join(void)} being void takes nothing from it: is it meant to be of {most}?"


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
    exercises = [f"{exercise.number} {exercise.title}" for exercise in assignment.graded]
    manual = f"by hand (of {most_by_hand})" if most_by_hand else "by hand"
    header = ["submission", *exercises, "total", "maximum", manual, "status", "look at", "file", "source version", "void"]
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(map(_cell, header))
        for each in marks:
            graded = each.status != NOT_GRADED
            points = [f"{each.points[exercise.number]:g}" if graded else "" for exercise in assignment.graded]
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
