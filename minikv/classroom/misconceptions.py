"""The page of common wrong answers, for the teacher: every mistake that a check of the exercises knows by name.

Read from the checks themselves, so that nobody keeps it up to date by hand. It is no part of what students get.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from minikv.classroom import exercises
from minikv.classroom.build import sources
from minikv.classroom.words import counted

PAGE = "common_wrong_answers.md"
HEAD = """# Common wrong answers

What the checks recognise, by exercise: the sentence is what the learner is told. Written by `python -m minikv.classroom build exercises`.
"""


def page(folder: Path) -> str:
    """All notebooks of ``folder``, all exercises, all mistakes with a name."""
    parts = [HEAD]
    for source in sources(folder):
        if exercises.is_exercise(source):
            assignment = exercises.read(source)
            parts.append(f"\n## {source.stem}\n")
            for exercise in assignment.exercises:
                worth = counted(exercise.points, "point") if exercise.points else "ungraded"
                parts.append(f"\n**{exercise.number}. {exercise.title}** ({worth}, {exercise.minutes} minutes)\n\n")
                own = [cell for cell in assignment.of("check") if cell.exercise == exercise.number]
                parts += [f"- {mistake}\n" for mistake in dict.fromkeys(each for cell in own for each in mistakes(cell.whole))]
                parts += [f"- (graded by hand: {cell.id})\n" for cell in assignment.of("manual") if cell.exercise == exercise.number]
    return "".join(parts)


def mistakes(code: str) -> Iterator[str]:
    """The messages of the ``mistakes`` in a check."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.keyword) and node.arg == "mistakes" and isinstance(node.value, ast.Dict):
            yield from (key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def has_exercises(folder: Path) -> bool:
    return any(map(exercises.is_exercise, sources(folder)))


def write_page(folder: Path) -> None:
    """Write the page, if there are exercises in ``folder``."""
    if has_exercises(folder):
        (folder / PAGE).write_text(page(folder), encoding="utf-8")


def check_page(folder: Path) -> list[str]:
    """What is wrong with the page; empty when it says what the checks do."""
    path = folder / PAGE
    if has_exercises(folder) and (not path.exists() or path.read_text(encoding="utf-8") != page(folder)):
        return [f"{path} does not say what the checks do: build without naming notebooks to write it again"]
    return []
