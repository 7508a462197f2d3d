"""Exercises: one source for the learner's notebook, the solution and the checks.

``exercises/source/NN_name.py`` is a notebook in jupytext's percent format whose cells have a role. ``given`` is supplied,
``answer`` is the learner's, ``check`` earns points by running, ``manual`` earns them from a person. An exercise whose heading says
*ungraded* in place of its points has checks that tell right from wrong and earn nothing. The builder writes
``exercises/NN_name.ipynb`` without solutions and hidden tests and ``solutions/NN_name.ipynb`` whole and executed, both with the
metadata of nbgrader (version 3), so that a school which runs nbgrader can take them as they are.
"""

from __future__ import annotations

import ast
import dis
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from minikv.classroom import build as building
from minikv.classroom.build import BuildError, Built
from minikv.classroom.words import counted

ROLES = ("given", "answer", "check", "manual")
HIDDEN_NOTE = "# (Here the grader checks more, with inputs of its own.)"
HEADING = re.compile(r"^## Exercise (\d+)\. (.+)\n+\*(?:(\d+) points?|ungraded), (\d+) minutes, (easy|medium|hard)\*", re.MULTILINE)
ANSWER_HERE = "*Write here.*"


@dataclass(frozen=True)
class Cell:
    """A cell of an exercise notebook; ``source`` is whole, with its markers."""

    id: str
    kind: str  # code or markdown
    role: str | None  # None for the prose around
    points: int
    source: str
    exercise: int | None  # the number of the exercise that it belongs to

    @property
    def stub(self) -> str:
        """What the learner gets: no solution, no hidden tests."""
        return without_hidden(without_solution(self.source, self.id))

    @property
    def whole(self) -> str:
        """With its solution and hidden tests, without the markers."""
        return whole(self.source)

    @property
    def learners(self) -> bool:
        """Whether the learner writes it."""
        return self.role in ("answer", "manual")


@dataclass(frozen=True)
class Exercise:
    """One exercise of a notebook as its heading announces it."""

    number: int
    title: str
    points: int  # 0: ungraded
    minutes: int
    difficulty: str


@dataclass(frozen=True)
class Assignment:
    """A notebook of exercises."""

    source: Path
    cells: tuple[Cell, ...]
    exercises: tuple[Exercise, ...]

    @property
    def points(self) -> int:
        """The most that can be earned, work graded by hand included."""
        return sum(exercise.points for exercise in self.exercises)

    @property
    def graded(self) -> tuple[Exercise, ...]:
        """The exercises that have points."""
        return tuple(exercise for exercise in self.exercises if exercise.points)

    def of(self, *roles: str) -> tuple[Cell, ...]:
        """The cells of these roles, in order."""
        return tuple(cell for cell in self.cells if cell.role in roles)


# ---------------------------------------------------------------- the markers in a cell


_SOLUTION = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION(?:: *(?P<todo>[^\n]+))?\n(?P<body>.*?)^[ \t]*### END SOLUTION[ \t]*$", re.M | re.S
)
_HIDDEN = re.compile(r"^(?P<indent>[ \t]*)### BEGIN HIDDEN TESTS[ \t]*\n(?P<body>.*?)^[ \t]*### END HIDDEN TESTS[ \t]*$", re.M | re.S)
_STUB = re.compile(r"^[ \t]*### STUB[ \t]*\n", re.M)


def without_solution(source: str, cell: str) -> str:
    """``source`` with each solution replaced by its stub. BuildError when a solution says nothing of what stands in its place."""

    def replace(found: re.Match[str]) -> str:
        indent, todo = found["indent"], found["todo"]
        _, *stub = _STUB.split(found["body"])
        if stub:
            lines = textwrap.dedent(stub[0]).splitlines()
            if not all(line.startswith("#") for line in lines):
                raise BuildError(f"cell {cell}: every line below ### STUB begins with #")
            return textwrap.indent("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines), indent)
        if not todo or not indent:
            raise BuildError(
                f"cell {cell}: write '### BEGIN SOLUTION: what to do' inside a function, or a part '### STUB' with what stands in its place"
            )
        return f"{indent}raise NotImplementedError({_quoted(todo.strip())})"

    return _SOLUTION.sub(replace, source)


def _quoted(text: str) -> str:
    return f'"{text}"' if '"' not in text and "\\" not in text else repr(text)


def without_hidden(source: str) -> str:
    return _HIDDEN.sub(lambda found: f"{found['indent']}{HIDDEN_NOTE}", source)


def whole(source: str) -> str:
    """``source`` with solutions and hidden tests and without the markers and stubs."""
    source = _SOLUTION.sub(lambda found: _STUB.split(found["body"])[0].rstrip("\n"), source)
    return _HIDDEN.sub(lambda found: found["body"].rstrip("\n"), source)


def hidden_begins(source: str, said: str) -> str:
    """The whole of a check, with the statement ``said`` where its hidden part begins."""
    return _HIDDEN.sub(lambda found: f"{found['indent']}{said}\n" + found["body"].rstrip("\n"), source)


# ---------------------------------------------------------------- names


def names_bound(code: str) -> set[str]:
    """The names that a cell gives to something at its top level; none when it is no Python."""
    return {step.argval for step in _steps(code, nested=False) if step.opname in ("STORE_NAME", "STORE_GLOBAL")}


def names_used(code: str) -> set[str]:
    """The global names that a cell and the functions in it look up; none when it is no Python."""
    return {step.argval for step in _steps(code, nested=True) if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")}


def names_changed(code: str | ast.Module) -> set[str]:
    """The notebook's names that a cell, or a ``global`` in one of its functions, binds or deletes; none when it is no Python."""
    ours = ("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL")
    anywhere = ("STORE_GLOBAL", "DELETE_GLOBAL")
    found = {step.argval for step in _steps(code, nested=False) if step.opname in ours}
    return found | {step.argval for step in _steps(code, nested=True) if step.opname in anywhere}


def _steps(code: str | ast.Module, nested: bool) -> Iterator[dis.Instruction]:
    try:
        pending = [compile(code, "cell", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    while pending:
        current = pending.pop()
        yield from dis.get_instructions(current)
        if nested:
            pending += [each for each in current.co_consts if isinstance(each, CodeType)]


# ---------------------------------------------------------------- reading a source


def is_exercise(source: Path) -> bool:
    """Whether a notebook's source has cells with roles."""
    return re.search(r'^# %%.* role="', source.read_text(encoding="utf-8"), re.M) is not None


def read(source: Path) -> Assignment:
    """The exercises in ``source``. BuildError, which names the cell, when something does not fit together."""
    notebook = building.read(source, known=frozenset({"tags", "role", "points"}))
    cells, exercises = [], []
    for cell in notebook.cells:
        for found in HEADING.finditer(cell.source if cell.cell_type == "markdown" else ""):
            number, title, points, minutes, difficulty = found.groups()
            exercises.append(Exercise(int(number), title, int(points or 0), int(minutes), difficulty))
        role, points = cell.metadata.get("role"), cell.metadata.get("points", 0)
        cells.append(Cell(cell.id, cell.cell_type, role, points, cell.source, exercises[-1].number if exercises else None))
    assignment = Assignment(source, tuple(cells), tuple(exercises))
    try:
        fault = next(_faults(assignment), None)
    except BuildError as wrong:  # a cell has no stub
        fault = str(wrong)
    if fault:
        raise BuildError(f"{source.name}: {fault}")
    return assignment


def _faults(assignment: Assignment) -> Iterator[str]:
    prefix = f"e{assignment.source.name.split('_')[0]}-"
    code = [cell for cell in assignment.cells if cell.kind == "code"]
    for cell in assignment.cells:  # also whether they are Python at all, which what follows relies on
        yield from (f"cell {cell.id}: {fault}" for fault in _faults_of(cell, prefix))
    if [exercise.number for exercise in assignment.exercises] != list(range(1, len(assignment.exercises) + 1)):
        yield (
            "exercises are numbered 1, 2, 3 ... in headings such as '## Exercise 1. Title', with '*3 points, 10 minutes, easy*' or "
            "'*ungraded, 10 minutes, easy*' below"
        )
    if not code or code[0].role != "given" or "lock_minikv()" not in code[0].source:
        yield "the first code cell is given and ends with lock_minikv()"
    supplied = set().union(*(_defined(cell.whole) for cell in assignment.of("given")))
    for cell in assignment.of("check"):
        if clash := names_bound(cell.whole) & supplied:
            yield f"cell {cell.id}: binds {', '.join(sorted(clash))}, which a given cell defines"
    for exercise in assignment.exercises:
        own = [cell for cell in assignment.cells if cell.exercise == exercise.number]
        if not any(cell.learners for cell in own):
            yield f"exercise {exercise.number} has no answer"
        for cell in own:
            if cell.role in ("check", "manual") and bool(cell.points) != bool(exercise.points):
                yield f"cell {cell.id}: checks and manual work have points=N, unless the heading of their exercise says *ungraded*"
        if (has := sum(cell.points for cell in own)) != exercise.points:
            yield f"exercise {exercise.number} announces {counted(exercise.points, 'point')}; its cells have {has}"


def _defined(code: str) -> set[str]:
    """What a cell defines or imports."""
    found: set[str] = set()
    for node in ast.parse(code).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(each.asname or each.name).split(".")[0] for each in node.names}
    return found


def _faults_of(cell: Cell, prefix: str) -> Iterator[str]:
    if cell.role is None and cell.kind == "code":
        yield f"a code cell has a role: {', '.join(ROLES)}"
    if cell.role is not None and cell.role not in ROLES:
        yield f"no role is called {cell.role!r}; there are {', '.join(ROLES)}"
    if cell.kind == "code" and not cell.id.startswith(prefix):
        yield f"its id begins with {prefix}"
    if cell.kind == "markdown" and cell.role not in (None, "manual"):
        yield f"a Markdown cell cannot be {cell.role}"
    if cell.points < 0 or (cell.points and cell.role not in ("check", "manual")):
        yield "checks and manual work have points=N, a number from 1 on, and nothing else has"
    if cell.learners and cell.exercise is None:
        yield "it stands before the first exercise's heading"
    if cell.role == "answer" and "### BEGIN SOLUTION" not in cell.source:
        yield "an answer has a part between ### BEGIN SOLUTION and ### END SOLUTION"
    if cell.role == "check" and "with check(" not in without_hidden(cell.source):
        yield "a check has a visible part 'with check(...)'"
    if "### " in cell.whole and re.search(r"### (BEGIN|END|STUB)", cell.whole):
        yield "a ### marker has no partner"
    if cell.kind == "code":
        for text in (cell.whole, cell.stub):
            try:
                ast.parse(text)
            except SyntaxError as wrong:
                yield f"line {wrong.lineno}: {wrong.msg}"


# ---------------------------------------------------------------- writing the notebooks


def stub_path(source: Path) -> Path:
    """Where the learner's notebook lies."""
    return source.parent.parent / f"{source.stem}.ipynb"


def solution_path(source: Path) -> Path:
    """Where the solved notebook lies: in ``solutions``, beside ``exercises``."""
    return source.parent.parent.parent / "solutions" / f"{source.stem}.ipynb"


def notebook(assignment: Assignment, solved: bool) -> Any:
    """The notebook with stubs, or whole; not executed."""
    made = building.read(assignment.source, known=frozenset({"tags", "role", "points"}))
    for have, cell in zip(made.cells, assignment.cells, strict=True):
        have.source = cell.whole if solved else cell.stub
        have.metadata.pop("points", None)
        if have.metadata.pop("role", None):
            have.metadata["nbgrader"] = nbgrader_metadata(cell)
        if cell.role == "manual" and cell.kind == "markdown" and not solved and have.source == cell.source:
            have.source = ANSWER_HERE
    return made


def nbgrader_metadata(cell: Cell) -> dict[str, Any]:
    """What nbgrader's schema 3 says of the cell."""
    graded = cell.role in ("check", "manual") and cell.points > 0
    kept: dict[str, Any] = {
        "grade": graded,
        "grade_id": cell.id,
        "locked": not cell.learners,
        "schema_version": 3,
        "solution": cell.learners,
        "task": False,
    }
    return {**kept, "points": cell.points} if graded else kept


def build(source: Path, cell_timeout_s: int = 120) -> Built:
    """Write the stubs, and the solution as executed. BuildError, with nothing written, when a cell of the solution fails."""
    import nbformat

    assignment = read(source)
    solved, path = notebook(assignment, solved=True), solution_path(source)
    path.parent.mkdir(exist_ok=True)
    seconds = building.execute(solved, path.parent, source.name, cell_timeout_s)
    stub = notebook(assignment, solved=False)
    nbformat.validate(stub)
    nbformat.write(solved, path)
    nbformat.write(stub, stub_path(source))
    return Built(path, seconds, building.peak_bytes_of_kernels())


def check(source: Path) -> list[str]:
    """What has come apart between ``source`` and its two notebooks; empty when nothing has."""
    assignment = read(source)
    faults = building.differences(stub_path(source), notebook(assignment, solved=False), source, executed=False)
    return faults + building.differences(solution_path(source), notebook(assignment, solved=True), source)
