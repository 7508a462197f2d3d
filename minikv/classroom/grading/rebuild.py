"""The notebook that is run for a submission: our cells in our order, with the learner's answers in their places.

Each check is wrapped into one call: the guard puts everything back first, runs the check as a whole, and its very last act prints
a token that is new for each check and run. A check that was cut short, skipped or talked out of its error has printed none. One
call and not three lines, because IPython runs line after line from a list, out of which the check itself could be taken.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from minikv.classroom.build import KERNEL
from minikv.classroom.checks import seed_for
from minikv.classroom.exercises import Assignment, Cell, hidden_begins, names_bound
from minikv.classroom.grading.plugin import REACH
from minikv.classroom.grading.submissions import Work


@dataclass(frozen=True)
class Piece:
    """A cell of the rebuilt notebook. ``name`` is our cell's; what a learner added is called after its neighbour and its place."""

    name: str
    kind: str  # given, answer, added or check
    code: str
    exercise: int | None = None
    token: str = ""
    hidden_token: str = ""
    theirs: bool = False  # the code is the learner's, and not a stub


def pieces(assignment: Assignment, work: Work, secret: bytes, taken_out: set[str], decided: set[str]) -> list[Piece]:
    """The cells to run. What was ``taken_out`` is blank again, and checks that are ``decided`` already are not run again."""
    setup = next(cell.id for cell in assignment.cells if cell.kind == "code")
    after: dict[str, list[Piece]] = {}
    for place, (neighbour, code) in enumerate(work.added):
        name = f"{neighbour}+{place}"
        if name not in taken_out:
            before_setup = [cell.id for cell in assignment.cells].index(neighbour) < [cell.id for cell in assignment.cells].index(setup)
            after.setdefault(setup if before_setup else neighbour, []).append(Piece(name, "added", code, theirs=True))
    made: list[Piece] = []
    for cell in assignment.cells:
        if cell.kind == "code":
            made += _ours(cell, work, secret, cell.id == setup, taken_out) if cell.id not in decided else []
        made += after.get(cell.id, [])
    return made


def _ours(cell: Cell, work: Work, secret: bytes, is_setup: bool, taken_out: set[str]) -> list[Piece]:
    if cell.role == "given":
        return [Piece(cell.id, "given", _given(cell, is_setup), cell.exercise)]
    if cell.role == "check":
        return [_check(cell, secret)]
    parts = [cell.stub] if cell.id in taken_out else work.answers.get(cell.id) or [cell.stub]
    stub = cell.stub.strip()
    return [Piece(cell.id, "answer", part, cell.exercise, theirs=part.strip() != stub) for part in parts if part.strip()]


def _given(cell: Cell, is_setup: bool) -> str:
    names = sorted(names_bound(cell.whole))
    if is_setup:  # the guard is loaded before the cell closes minikv, and binds no name that an answer could use
        load = '__import__("importlib").import_module("minikv.classroom.grading.guard")'
        return f"{load}\n{cell.whole}\n{REACH}.start(globals(), {names!r})"
    return f"{REACH}.begin('')\n{cell.whole}\n{REACH}.keep({names!r})"


def _check(cell: Cell, secret: bytes) -> Piece:
    token, hidden_token = secrets.token_hex(16), secrets.token_hex(16)
    body = hidden_begins(cell.source, f"{REACH}.say({hidden_token!r})")
    code = f"{REACH}.check({seed_for(secret, cell.id)!r}, {body!r}, {token!r})"
    return Piece(cell.id, "check", code, cell.exercise, token, hidden_token)


def as_notebook(made: list[Piece]) -> Any:
    """The notebook to run, a code cell for each piece."""
    import nbformat

    notebook = nbformat.v4.new_notebook(metadata=KERNEL)
    notebook.cells = [
        nbformat.v4.new_code_cell(piece.code, id=f"cell-{place}", metadata={"minikv": piece.kind}) for place, piece in enumerate(made)
    ]
    return notebook
