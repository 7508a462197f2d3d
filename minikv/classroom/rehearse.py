"""An exercise notebook run without a kernel, with answers of one's choice: what its tests and its authors use.

``run`` takes milliseconds where a notebook takes a second, so every wrong answer that people really give can be held against
the message that it should get. The grader itself runs notebooks.
"""

from __future__ import annotations

import contextlib
import io
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minikv.classroom import checks, exercises
from minikv.classroom.build import BuildError, Built
from minikv.classroom.exercises import Assignment, Cell


@dataclass(frozen=True)
class Result:
    """Whether a check passed, and what it said when not."""

    passed: bool
    message: str = ""


@dataclass
class Rehearsal:
    """The results of all checks by name, and what the other cells raised: an answer that does not even run is in ``broken``."""

    results: dict[str, Result] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    points: int = 0

    def __getitem__(self, check: str) -> Result:
        return self.results[check]

    def failed(self) -> set[str]:
        """The names of the checks that failed."""
        return {name for name, result in self.results.items() if not result.passed}


@dataclass(frozen=True)
class Wrong:
    """A wrong answer that people really give: ``check`` must fail and say ``says``."""

    answer: str
    check: str
    says: str
    code: str


@dataclass(frozen=True)
class Right:
    """An answer unlike ours that is right, too."""

    answer: str
    code: str


def solution(assignment: Assignment) -> dict[str, str]:
    """The answers of the source itself."""
    return {cell.id: cell.whole for cell in assignment.of("answer", "manual") if cell.kind == "code"}


def run(
    source: Path | Assignment,
    answers: Mapping[str, str] | None = None,
    secret: bytes = b"",
    hidden: bool = True,
    only: int | None = None,
    prove: bool = False,
) -> Rehearsal:
    """Run the notebook with ``answers`` by the name of their cell; the others are blank.

    ``hidden=False`` leaves the hidden tests out, as the learner's own notebook does. ``only`` runs the supplied cells and one
    exercise, by its number. With ``prove`` a check fails in which a mistake with a name cannot be looked for.
    ValueError for an answer to no cell.
    """
    assignment = exercises.read(source) if isinstance(source, Path) else source
    unknown = (answers or {}).keys() - {cell.id for cell in assignment.of("answer", "manual")}
    if unknown:
        raise ValueError(f"{assignment.source.name} has no answer called {', '.join(sorted(unknown))}")
    done, names = Rehearsal(), {"__name__": "__main__"}
    with _as_before(), checks.proving() if prove else contextlib.nullcontext():
        for cell in assignment.cells:
            if cell.kind == "code" and (only in (None, cell.exercise) or cell.role == "given"):
                _run_cell(cell, _code(cell, answers or {}, hidden), names, secret, done)
        checks.unlock(names)
    return done


def _code(cell: Cell, answers: Mapping[str, str], hidden: bool) -> str:
    if cell.learners:
        return answers.get(cell.id, cell.stub)
    return cell.whole if hidden else cell.stub


def _run_cell(cell: Cell, code: str, names: dict[str, Any], secret: bytes, done: Rehearsal) -> None:
    checks.use_seed(checks.seed_for(secret, cell.id))
    said = ""
    try:
        _execute(code, f"<cell {cell.id}>", names)
    except checks.CheckFailed as failed:
        said = str(failed)
    except BaseException as wrong:
        if isinstance(wrong, KeyboardInterrupt):
            raise
        said = f"{type(wrong).__name__}: {wrong}"
    if cell.role == "check":
        done.results[cell.id] = Result(not said, said)
        done.points += 0 if said else cell.points
    elif said:
        done.broken[cell.id] = said


def _execute(code: str, name: str, names: dict[str, Any]) -> None:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # so that a message can show the line
    exec(compile(code, name, "exec"), names)


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """What notebooks print is dropped, and the switches of torch that they turn are turned back."""
    import torch

    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)


def build(source: Path) -> Built:
    """``exercises.build``, once the solution has been rehearsed: BuildError, with nothing written, when a cell of it fails, or when a
    mistake that a check names cannot be looked for.
    """
    assignment = exercises.read(source)
    rehearsed = run(assignment, solution(assignment), prove=True)
    for name, said in [*rehearsed.broken.items(), *((name, rehearsed[name].message) for name in sorted(rehearsed.failed()))]:
        raise BuildError(f"{source.name}, cell {name}: {said}")
    return exercises.build(source)
