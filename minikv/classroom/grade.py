"""python -m minikv.classroom grade: from a pile of notebooks to a table of points, and a page of feedback for each.

Only answers come from a submission; checks and supplied parts are those of our own source. See ``exercises/README.md`` for how to
use it and for what it does not protect against.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from minikv.classroom import exercises
from minikv.classroom.build import BuildError, sha256
from minikv.classroom.exercises import Assignment
from minikv.classroom.grading import feedback, marks, submissions
from minikv.classroom.grading.marks import Mark, MarksError
from minikv.classroom.grading.run import STOP, Limits, run
from minikv.classroom.grading.submissions import Handed, SubmissionsError, Unreadable, Work


@dataclass(frozen=True)
class Graded:
    """A mark, and the work that it is for."""

    mark: Mark
    work: Work


def grade(
    assignment: Assignment,
    handed: list[Handed],
    limits: Limits,
    *,
    jobs: int = 1,
    secret: bytes = b"",
    void: tuple[str, ...] = (),
    done: Callable[[Mark], None] = lambda mark: None,
) -> list[Graded]:
    """Grade each of ``handed``, ``jobs`` at a time; in the order given, and ``done`` is called as each is finished."""

    def one(each: Handed) -> Graded:
        try:
            graded = _grade_one(assignment, each, limits, secret, void)
        except Exception as wrong:  # whatever one submission does to the grader, the others get their marks
            why = f"the grader failed on it ({type(wrong).__name__}: {wrong}): please look at it by hand"
            graded = Graded(marks.unreadable(assignment, each, why, void), Work())
        done(graded.mark)
        return graded

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(one, handed))
        except KeyboardInterrupt:
            STOP.set()
            pool.shutdown(wait=True, cancel_futures=True)
            STOP.clear()
            raise


def _grade_one(assignment: Assignment, handed: Handed, limits: Limits, secret: bytes, void: tuple[str, ...]) -> Graded:
    try:
        theirs, stamp = submissions.read(handed.content)
    except Unreadable as wrong:
        return Graded(marks.unreadable(assignment, handed, str(wrong), void), Work())
    work = submissions.match(theirs, assignment)
    if not work.answers and not work.prose and not any(cell.grade_id or cell.id for cell in theirs):
        why = "nothing in this notebook belongs to these exercises"
        return Graded(marks.unreadable(assignment, handed, why, void), work)
    ran = run(assignment, work, limits, secret)
    return Graded(marks.mark(assignment, handed, work, ran, void, bool(stamp) and stamp != sha256(assignment.source)), work)


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``grade``."""
    parser.add_argument("source", type=Path, help="the exercises, such as exercises/source/05_pages.py")
    parser.add_argument("submissions", type=Path, nargs="+", help="a folder, notebooks, or the zip that Moodle or Canvas gives")
    parser.add_argument("--csv", type=Path, required=True, help="the table to write, a row for each submission")
    parser.add_argument("--feedback", type=Path, metavar="DIR", help="write a page for each submission, under its own path")
    parser.add_argument("--answers", type=Path, metavar="DIR", help="export the answers, for a plagiarism checker")
    parser.add_argument("--secret", type=Path, metavar="FILE", help="hidden checks draw their inputs from what is in this file")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="submissions at a time (default: %(default)s)")
    parser.add_argument("--cell-timeout", type=float, default=30, metavar="S", help="seconds for a cell (default: %(default)s)")
    parser.add_argument("--wall", type=float, default=300, metavar="S", help="seconds for a submission (default: %(default)s)")
    parser.add_argument("--overrides", type=Path, metavar="F", help="a CSV of your own decisions: submission, exercise, points, reason")
    parser.add_argument("--void", nargs="+", default=[], metavar="GRADE_ID", help="checks that count for nobody")
    parser.add_argument(
        "--previous", type=Path, metavar="OLD.csv", help="an older table: list whose total changed, keep its points by hand"
    )


def command(arguments: argparse.Namespace) -> int:
    """Grade as the arguments say; 0 unless there was nothing to grade, or a file of the teacher's cannot be used."""
    try:
        return _command(arguments)
    except (BuildError, SubmissionsError, MarksError) as wrong:
        print(wrong, file=sys.stderr)
    except OSError as wrong:
        print(f"{wrong.filename}: {wrong.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped; no table was written.", file=sys.stderr)
    return 1


def _command(arguments: argparse.Namespace) -> int:
    if sys.platform == "win32":
        raise SubmissionsError("the grader needs Linux or macOS; on Windows run it in the container that exercises/README.md describes")
    if arguments.source.is_dir() or not arguments.source.exists():
        raise SubmissionsError(f"{arguments.source} is no source of exercises; name one file, such as exercises/source/05_pages.py")
    assignment = exercises.read(arguments.source)
    marks.check_graded(assignment)
    marks.check_void(arguments.void, assignment)
    secret = arguments.secret.read_bytes().strip() if arguments.secret else b""
    if arguments.secret and not secret:
        raise MarksError(f"{arguments.secret} is empty; a secret is a line that nobody can guess")
    overrides = marks.read_overrides(arguments.overrides, assignment) if arguments.overrides else {}
    handed = submissions.find(arguments.submissions, assignment)
    graded = _with_progress(assignment, handed, arguments, secret)
    told = marks.apply(overrides, [each.mark for each in graded])
    told += marks.changes(arguments.previous, [each.mark for each in graded]) if arguments.previous else []
    by_hand = marks.by_hand(arguments.previous) if arguments.previous else {}
    marks.write_csv(arguments.csv, assignment, [each.mark for each in graded], arguments.void, by_hand)
    for each in graded:
        if arguments.feedback:
            feedback.write(arguments.feedback, each.mark, assignment, arguments.void)
        if arguments.answers:
            feedback.export_answers(arguments.answers, each.mark, each.work, assignment)
    print("\n".join([*told, _summary(graded, arguments.csv)]))
    if not arguments.secret and any("BEGIN HIDDEN TESTS" in cell.source for cell in assignment.of("check")):
        print("Graded without --secret: the inputs of the hidden checks are those that anyone with the source can compute.")
    return 0


def _with_progress(assignment: Assignment, handed: list[Handed], arguments: argparse.Namespace, secret: bytes) -> list[Graded]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("grading", total=len(handed))
        return grade(
            assignment,
            handed,
            Limits(cell_s=arguments.cell_timeout, wall_s=arguments.wall),
            jobs=max(1, arguments.jobs),
            secret=secret,
            void=tuple(arguments.void),
            done=lambda mark: progress.advance(bar),
        )


def _summary(graded: list[Graded], csv: Path) -> str:
    count = {status: sum(each.mark.status == status for each in graded) for status in ("ok", "partial", "tampered", "unreadable")}
    said = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    return f"{len(graded)} submissions ({said}) in {csv}"
