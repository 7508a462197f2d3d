"""python -m minikv.classroom grade: from a pile of notebooks to a table of points, and a page of feedback for each.

First the solution is graded, to see that this machine can. Finished marks are kept in TABLE.partial until the table is written:
if the grader is ended (by Ctrl+C, by a power cut, by a submission that kills it), the same command goes on from there.

Only answers come from a submission; checks and supplied parts are those of our own source. See ``exercises/README.md`` for how to
use it and for what it does not protect against.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from minikv.classroom import exercises
from minikv.classroom.build import BuildError, sha256
from minikv.classroom.exercises import Assignment
from minikv.classroom.grading import feedback, marks, submissions
from minikv.classroom.grading.discretion import withhold
from minikv.classroom.grading.journal import DEATHS, Journal
from minikv.classroom.grading.marks import NOT_GRADED, Mark, MarksError
from minikv.classroom.grading.run import STOP, Limits, Ran, Verdict, run
from minikv.classroom.grading.submissions import Handed, SubmissionsError, Unreadable, Work
from minikv.classroom.grading.supervise import hardened
from minikv.classroom.grading.suspicion import suspicious


class GraderError(Exception):
    """The grader cannot do its work here, and why."""


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
    compared: Mapping[str, int] | None = None,
    journal: Journal | None = None,
) -> list[Graded]:
    """Grade each of ``handed``, ``jobs`` at a time; in the order given, and ``done`` is called as each is finished.

    ``compared`` says how many comparisons each check makes on a right answer. What stands in the ``journal`` is not run
    again; what was running when an earlier grader ended comes last, one after the other.
    """

    def one(each: Handed) -> Graded:
        graded = _kept(assignment, each, journal) or _graded(assignment, each, limits, secret, void, compared or {}, journal)
        done(graded.mark)
        return graded

    with ThreadPoolExecutor(jobs) as pool:
        try:
            alone = [bool(journal and journal.unfinished(each)) for each in handed]
            together = pool.map(one, [each for each, its in zip(handed, alone, strict=True) if not its])
            found = [None if its else next(together) for its in alone]
            return [graded or pool.submit(one, each).result() for each, graded in zip(handed, found, strict=True)]
        except KeyboardInterrupt:
            STOP.set()
            pool.shutdown(wait=True, cancel_futures=True)
            STOP.clear()
            raise


def _kept(assignment: Assignment, handed: Handed, journal: Journal | None) -> Graded | None:
    """What an earlier grader has finished."""
    mark = journal.mark(handed) if journal else None
    if mark is None:
        return None
    try:
        return Graded(mark, submissions.match(submissions.read(handed.content)[0], assignment))
    except Unreadable:
        return Graded(mark, Work())


def _graded(
    assignment: Assignment, handed: Handed, limits: Limits, secret: bytes, void: tuple[str, ...], compared: Mapping[str, int],
    journal: Journal | None,
) -> Graded:  # fmt: skip
    """Grade one; whatever it does to the grader, the others get their marks."""
    deaths = journal.unfinished(handed) if journal else 0
    if deaths >= DEATHS:
        why = f"the grader was ended {deaths} times while this was running, the last time while nothing else was"
        return _not_graded(assignment, handed, why, void)
    if journal:
        journal.begin(handed)
    try:
        graded = _grade_one(assignment, handed, limits, secret, void, compared)
    except Exception as wrong:
        why = f"the grader failed on it ({type(wrong).__name__}: {wrong}): please look at it by hand"
        graded = _not_graded(assignment, handed, why, void)
    if deaths:
        graded.mark.look_at.append("the grader was ended once while this was running")
    if journal and (STOP.is_set() or graded.mark.status == NOT_GRADED):
        journal.let_go(handed)
    elif journal:
        journal.finish(handed, graded.mark)
    return graded


def _not_graded(assignment: Assignment, handed: Handed, why: str, void: tuple[str, ...]) -> Graded:
    mark = marks.unreadable(assignment, handed, f"NOT GRADED: {why}", void)
    return Graded(replace(mark, status=NOT_GRADED), Work())


def _grade_one(
    assignment: Assignment, handed: Handed, limits: Limits, secret: bytes, void: tuple[str, ...], compared: Mapping[str, int]
) -> Graded:
    try:
        theirs, stamp = submissions.read(handed.content)
    except Unreadable as wrong:
        return Graded(marks.unreadable(assignment, handed, str(wrong), void), Work())
    work = submissions.match(theirs, assignment)
    if not work.answers and not work.prose and not any(cell.grade_id or cell.id for cell in theirs):
        why = "nothing in this notebook belongs to these exercises"
        return Graded(marks.unreadable(assignment, handed, why, void), work)
    ran = run(assignment, work, limits, secret)
    if ran.not_graded:
        return _not_graded(assignment, handed, ran.not_graded, void)
    if suspicious(work, assignment):
        believe(ran, compared)
    withhold(ran, work, assignment, secret)
    work.tampered += dict.fromkeys(ran.tampered)
    return Graded(marks.mark(assignment, handed, work, ran, void, bool(stamp) and stamp != sha256(assignment.source)), work)


def reference(assignment: Assignment, limits: Limits, secret: bytes) -> dict[str, int]:
    """How many comparisons each check makes on the solution. GraderError when the solution does not get all its points here."""
    answers = {cell.id: [cell.whole] for cell in assignment.of("answer", "manual") if cell.kind == "code"}
    ran = run(assignment, Work(answers=answers), limits, secret)
    failed = [
        f"{name}: {verdict.message.splitlines()[0] if verdict.message else ''}"
        for name, verdict in ran.verdicts.items()
        if not verdict.passed
    ]
    missing = [cell.id for cell in assignment.of("check") if cell.id not in ran.verdicts]
    if failed or missing or ran.not_graded:
        why = "; ".join(filter(None, [ran.not_graded, *failed, *(f"{name} was not decided" for name in missing), *ran.notes]))
        raise GraderError(f"the solution itself does not get all its points on this machine, so nothing was graded ({why})")
    return ran.compared


def believe(ran: Ran, compared: Mapping[str, int]) -> None:
    """Take back what a check gave although fewer comparisons were made than on the solution. For suspicious code only: a right
    answer of another form may need fewer, where a check compares each of its parts."""
    for name, verdict in ran.verdicts.items():
        if verdict.passed and ran.compared.get(name, 0) < compared.get(name, 0):
            ran.verdicts[name] = Verdict(False, "The check did not run to its end.")
            ran.tampered.append(f"{name}: only {ran.compared.get(name, 0)} of {compared[name]} comparisons were made")


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``grade``."""
    parser.add_argument("source", type=Path, help="the exercises, such as exercises/source/05_pages.py")
    parser.add_argument("submissions", type=Path, nargs="+", help="a folder, notebooks, or the zip that Moodle or Canvas gives")
    parser.add_argument(
        "--csv", type=Path, required=True, metavar="TABLE",
        help="the table to write, a row for each submission. Finished rows are kept beside it, in TABLE.partial, until all are done: after "
        "an interruption the same command goes on from there, and says who was running",
    )  # fmt: skip
    parser.add_argument("--feedback", type=Path, metavar="DIR", help="write a page for each submission, under its own path")
    parser.add_argument("--answers", type=Path, metavar="DIR", help="export the answers, for a plagiarism checker")
    parser.add_argument(
        "--secret", type=Path, metavar="FILE", help="hidden checks draw their inputs from what is in this file; - reads it from the "
        "standard input, so that no submission finds the file's name on the command line",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="submissions at a time (default: %(default)s)")
    parser.add_argument("--cell-timeout", type=float, default=30, metavar="S", help="seconds for a cell (default: %(default)s)")
    parser.add_argument("--wall", type=float, default=300, metavar="S", help="seconds for a submission (default: %(default)s)")
    parser.add_argument("--overrides", type=Path, metavar="F", help="a CSV of your own decisions: submission, exercise, points, reason")
    parser.add_argument("--void", nargs="+", default=[], metavar="GRADE_ID", help="checks that count for nobody")
    parser.add_argument(
        "--previous", type=Path, metavar="OLD.csv", help="an older table: list whose total changed, keep its points by hand"
    )


def command(arguments: argparse.Namespace) -> int:
    """Grade as the arguments say: 0 when all were graded, 2 when some were not, 1 when nothing was, or a file cannot be used."""
    try:
        with hardened():
            return _command(arguments)
    except (BuildError, SubmissionsError, MarksError, GraderError) as wrong:
        print(wrong, file=sys.stderr)
    except OSError as wrong:
        print(f"{wrong.filename}: {wrong.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped; no table was written. The same command goes on from here.", file=sys.stderr)
    return 1


def _command(arguments: argparse.Namespace) -> int:
    if sys.platform == "win32":
        raise SubmissionsError("the grader needs Linux or macOS; on Windows run it in the container that exercises/README.md describes")
    if arguments.source.is_dir() or not arguments.source.exists():
        raise SubmissionsError(f"{arguments.source} is no source of exercises; name one file, such as exercises/source/05_pages.py")
    assignment = exercises.read(arguments.source)
    marks.check_graded(assignment)
    marks.check_void(arguments.void, assignment)
    secret = _secret(arguments.secret)
    overrides = marks.read_overrides(arguments.overrides, assignment) if arguments.overrides else {}
    handed = submissions.find(arguments.submissions, assignment)
    limits = Limits(cell_s=arguments.cell_timeout, wall_s=arguments.wall)
    journal = Journal(arguments.csv, secret, f"{marks.version(assignment)} {limits} {sorted(arguments.void)}")
    print("".join(_goes_on(journal, handed)), end="")
    graded = _with_progress(assignment, handed, arguments, limits, secret, journal)
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
    if any(each.mark.status == NOT_GRADED for each in graded):
        return 2  # the journal stays: the same command tries those again, and only those
    journal.remove()
    return 0


def _secret(path: Path | None) -> bytes:
    if path is None:
        return b""
    secret = (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).strip()
    if not secret:
        raise MarksError(f"{'the standard input' if str(path) == '-' else path} is empty; a secret is a line that nobody can guess")
    return secret


def _goes_on(journal: Journal, handed: list[Handed]) -> list[str]:
    """What is said when an earlier grader has left a journal."""
    finished = sum(journal.mark(each) is not None for each in handed)
    unfinished = [each.who for each in handed if journal.unfinished(each)]
    said = [f"Going on from {journal.path}: {finished} of {len(handed)} are graded already."] if finished or unfinished else []
    if unfinished:
        said.append(f"Running when the grader was ended: {', '.join(unfinished)}. They come last, one after the other; look at them.")
    if journal.refused:
        said.append(f"{journal.refused} lines of {journal.path} are damaged or of other arguments, and do not count.")
    return [f"{line}\n" for line in said]


def _with_progress(
    assignment: Assignment, handed: list[Handed], arguments: argparse.Namespace, limits: Limits, secret: bytes, journal: Journal
) -> list[Graded]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if journal.compared is None:
        journal.solved(reference(assignment, limits, secret))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("grading", total=len(handed))
        return grade(
            assignment,
            handed,
            limits,
            jobs=max(1, arguments.jobs),
            secret=secret,
            void=tuple(arguments.void),
            done=lambda mark: progress.advance(bar),
            compared=journal.compared,
            journal=journal,
        )


def _summary(graded: list[Graded], csv: Path) -> str:
    statuses = ("ok", "partial", "tampered", "unreadable", NOT_GRADED)
    count = {status: sum(each.mark.status == status for each in graded) for status in statuses}
    said = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    left = [each.mark.who for each in graded if each.mark.status == NOT_GRADED]
    again = f"\nNOT GRADED: {', '.join(left)}. The same command tries them again, and only them." if left else ""
    return f"{len(graded)} submissions ({said}) in {csv}{again}"
