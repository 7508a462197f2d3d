"""Which names of the notebook an answer binds anew: ``check = None``, ``del expect``, ``def held_rows``.

It gains nothing, since the guard puts the given names back before each check; but nobody does it without a reason, and after a
careless one the learner's own notebook says other things than the grader. So a person should see it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from minikv.classroom.exercises import Assignment, names_bound, names_changed
from minikv.classroom.grading.submissions import Work

Import = tuple[str, str]
"""What an import binds, and the dotted name that it is bound to."""


def rebound(work: Work, assignment: Assignment) -> list[str]:
    """What to look at, a sentence for each answer or added cell that binds or deletes a name of the given cells."""
    given = set().union(*(names_bound(cell.whole) for cell in assignment.of("given")))
    given -= set().union(*(names_bound(cell.stub) for cell in assignment.of("answer")))  # what an answer is asked to define
    same = {each for cell in assignment.of("given") for each in _imports(ast.parse(cell.whole).body)}
    cells = [*((name, "\n".join(parts)) for name, parts in work.answers.items()), *((f"a cell added after {n}", c) for n, c in work.added)]
    found = ((label, sorted(changed(code, same) & given)) for label, code in cells)
    return [f"{label} binds or deletes {', '.join(names)}, which the notebook gives" for label, names in found if names]


def changed(code: str, same: Iterable[Import] = ()) -> set[str]:
    """The names of the notebook that ``code`` assigns, defines, imports or deletes; none when it is no Python.

    An import of the ``same`` thing by the same name changes nothing and is left out: ``import math`` where math is given.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    kept = [statement for statement in tree.body if not _imports([statement]) or not set(_imports([statement])) <= set(same)]
    return names_changed(ast.Module(kept, []))


def _imports(statements: Iterable[ast.stmt]) -> list[Import]:
    found = []
    for statement in statements:
        if isinstance(statement, ast.Import):
            found += [(each.asname or each.name.split(".")[0], each.name if each.asname else each.name.split(".")[0])
                      for each in statement.names]  # fmt: skip
        elif isinstance(statement, ast.ImportFrom):
            found += [(each.asname or each.name, f"{statement.module}.{each.name}") for each in statement.names]
    return found
