"""What the learner gets back: a page for each submission, under the same path as what was handed in.

A message of a hidden check shows nothing that was drawn from the secret, and nothing that an answer could smuggle out through its
own exception: of it only such lines are kept as stand, word for word, in the check's source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from html import escape
from pathlib import Path

from minikv.classroom.exercises import Assignment, Cell, Exercise
from minikv.classroom.grading.marks import Mark
from minikv.classroom.grading.run import Verdict
from minikv.classroom.grading.submissions import Work
from minikv.classroom.words import counted

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}pre{white-space:pre-wrap;background:#f4f4f4;padding:.7em}"
)


def write(folder: Path, mark: Mark, assignment: Assignment, void: Iterable[str]) -> Path:
    """Write the page of one submission; its path."""
    path = folder / f"{mark.path}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(mark, assignment, void), encoding="utf-8", errors="replace")
    return path


def page(mark: Mark, assignment: Assignment, void: Iterable[str]) -> str:
    left_out = set(void)
    parts = [f"<h1>{escape(assignment.source.stem)}: {mark.total:g} of {counted(mark.maximum, 'point')}</h1>"]
    parts += [f"<p>{escape(note)}.</p>" for note in mark.told]
    for exercise in assignment.exercises:
        parts.append(f"<h2>Exercise {exercise.number}. {escape(exercise.title)}: {_earned(exercise, mark)}</h2>")
        parts += [*_decided(exercise, mark), "<ul>"]
        for cell in assignment.of("check", "manual"):
            if cell.exercise == exercise.number:
                counts = exercise in assignment.graded and exercise.number not in mark.overrides
                parts.append(_line(cell, mark.verdicts.get(cell.id), cell.id in left_out, counts))
        parts.append("</ul>")
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Feedback</title><style>{STYLE}</style>\n{body}\n</html>\n'


def _earned(exercise: Exercise, mark: Mark) -> str:
    return counted(mark.points[exercise.number], "point") if exercise.number in mark.points else "ungraded"


def _decided(exercise: Exercise, mark: Mark) -> list[str]:
    """What a person decided about the exercise, and why: it counts in place of what the checks gave."""
    if exercise.number not in mark.overrides:
        return []
    override, most = mark.overrides[exercise.number], mark.most[exercise.number]
    given = f"{override.points:g} of {counted(most, 'point')}" if override.points <= most else counted(override.points, "point")
    return [f"<p>Decided by a person, in place of the checks below: {given}. Reason: {escape(override.reason)}.</p>"]


def _line(cell: Cell, verdict: Verdict | None, void: bool, counts: bool) -> str:
    """A check in a line. ``counts`` is False where its points do not: only whether it passed is said then."""
    if cell.role == "manual":
        worth = f" ({counted(cell.points, 'point')})" if cell.points else ""
        return f"<li>{escape(cell.id)}: read by a person{worth}</li>"
    if void:
        return f"<li>{escape(cell.id)}: does not count</li>"
    if verdict is None:
        return f"<li>{escape(cell.id)}: {f'0 of {cell.points}; it' if counts else 'it'} was not run</li>"
    if verdict.passed:
        return f"<li>{escape(cell.id)}: {f'{cell.points} of {cell.points}' if counts else 'passed'}</li>"
    return f"<li>{escape(cell.id)}: {f'0 of {cell.points}' if counts else 'not passed'}<pre>{escape(shown(verdict, cell))}</pre></li>"


def shown(verdict: Verdict, cell: Cell) -> str:
    """The message of a failed check as the learner may see it."""
    if not verdict.hidden:
        return verdict.message
    known = {line for node in ast.walk(ast.parse(cell.whole)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
             for line in node.value.splitlines()}  # fmt: skip
    kept = [line for line in verdict.message.splitlines() if line[6:] in known]
    return "\n".join(["A hidden check, with other inputs than those that you can see.", *kept])


def export_answers(folder: Path, mark: Mark, work: Work, assignment: Assignment) -> None:
    """The answers as files, a folder for each person, as checkers for plagiarism want them."""
    own = folder / "".join(character if character.isalnum() or character in "-_. " else "_" for character in mark.who).strip(". ") / ""
    if work.answers or work.prose:
        own.mkdir(parents=True, exist_ok=True)
    for cell in assignment.of("answer", "manual"):
        if cell.id in work.answers:
            (own / f"{cell.id}.py").write_text("\n\n".join(work.answers[cell.id]) + "\n", encoding="utf-8", errors="replace")
        elif work.prose.get(cell.id):
            (own / f"{cell.id}.md").write_text(work.prose[cell.id] + "\n", encoding="utf-8", errors="replace")
