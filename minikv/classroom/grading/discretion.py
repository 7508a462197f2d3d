"""What a submission's own messages may tell its author: nothing of the secret, and little when its code is suspicious.

An answer runs as the teacher's user. What it has read somewhere it can raise as an exception, or give back as its result, and both
would stand in the feedback. So the secret, and what hidden inputs are drawn from, are never shown; and of code that a person
should look at first, only the kind of an exception is, and such lines of a message as stand in the check itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace

from minikv.classroom.checks import seed_for
from minikv.classroom.exercises import Assignment, Cell
from minikv.classroom.grading.run import Ran
from minikv.classroom.grading.submissions import Work
from minikv.classroom.grading.suspicion import suspicious

WITHHELD = "(not shown: the code does things that a person should look at first)"
SECRET = "(not shown: this held the teacher's secret)"


def withhold(ran: Ran, work: Work, assignment: Assignment, secret: bytes) -> None:
    """Take out of what ``ran`` tells what its author must not be told, and note who tried."""
    checks = {cell.id: cell for cell in assignment.of("check")}
    secrets = _secrets(secret, checks) if secret else []
    dubious = suspicious(work, assignment)
    told = set()
    for name, said in ran.broken.items():
        if any(each in said for each in secrets):
            told.add(name)
            ran.broken[name] = SECRET
        elif dubious:
            ran.broken[name] = f"{said.partition(':')[0]} {WITHHELD}"
    for name, verdict in ran.verdicts.items():
        if any(each in verdict.message for each in secrets):
            told.add(name)
            ran.verdicts[name] = replace(verdict, message=SECRET)
        elif dubious and not verdict.passed and not verdict.hidden:
            ran.verdicts[name] = replace(verdict, message=_ours(verdict.message, checks[name]))
    ran.tampered += [f"{name}: its message held the teacher's secret, or what hidden inputs are drawn from" for name in sorted(told)]


def _secrets(secret: bytes, checks: Iterable[str]) -> list[str]:
    written = secret.decode("utf-8", "replace")
    return [written, written[::-1], secret.hex(), *(seed_for(secret, name) for name in checks)]


def _ours(message: str, check: Cell) -> str:
    """The lines that stand word for word in the check's source."""
    known = {line for node in ast.walk(ast.parse(check.whole)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
             for line in node.value.splitlines()}  # fmt: skip
    return "\n".join([*(line for line in message.splitlines() if line[6:] in known), WITHHELD])
