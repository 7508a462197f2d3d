"""What the learner gets back: a page for each submission, under the same path as what was handed in.

A message of a hidden check shows nothing that was drawn from the secret, and nothing that an answer could smuggle out through its
own exception: of it only such lines are kept as stand, word for word, in the check's source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from html import escape
from pathlib import Path

from minikv.classroom.exercises import Assignment, Cell
from minikv.classroom.grading.marks import Mark
from minikv.classroom.grading.run import Verdict
from minikv.classroom.grading.submissions import Work

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
    parts = [f"<h1>{escape(assignment.source.stem)}: {mark.total:g} of {mark.maximum} points</h1>"]
    parts += [f"<p>{escape(note)}.</p>" for note in mark.told]
    for exercise in assignment.exercises:
        parts.append(f"<h2>Exercise {exercise.number}. {escape(exercise.title)}: {mark.points.get(exercise.number, 0):g} points</h2><ul>")
        for cell in assignment.of("check", "manual"):
            if cell.exercise == exercise.number:
                parts.append(_line(cell, mark.verdicts.get(cell.id), cell.id in left_out))
        parts.append("</ul>")
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Feedback</title><style>{STYLE}</style>\n{body}\n</html>\n'


def _line(cell: Cell, verdict: Verdict | None, void: bool) -> str:
    if cell.role == "manual":
        return f"<li>{escape(cell.id)}: read by a person ({cell.points} points)</li>"
    if void:
        return f"<li>{escape(cell.id)}: does not count</li>"
    if verdict is None:
        return f"<li>{escape(cell.id)}: 0 of {cell.points}; it was not run</li>"
    if verdict.passed:
        return f"<li>{escape(cell.id)}: {cell.points} of {cell.points}</li>"
    return f"<li>{escape(cell.id)}: 0 of {cell.points}<pre>{escape(shown(verdict, cell))}</pre></li>"


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
