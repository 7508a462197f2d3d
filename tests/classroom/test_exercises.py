"""Every exercise notebook: blank earns nothing, the solution everything, wrong answers are told why, other right ones pass.

Run without a kernel, so that each answer takes milliseconds. The answers stand in ``tests/classroom/exercises``.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import minikv
from minikv.classroom import exercises
from minikv.classroom.exercises import Assignment
from minikv.classroom.grading import run as grading
from minikv.classroom.grading.rebound import rebound
from minikv.classroom.grading.run import Limits
from minikv.classroom.grading.submissions import Work
from minikv.classroom.grading.suspicion import flags
from minikv.classroom.rehearse import Right, Wrong, run, solution

SOURCES = sorted((Path(minikv.__file__).parent.parent / "exercises" / "source").glob("*.py"))
each_notebook = pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])


@cache
def assignment(source: Path) -> Assignment:
    return exercises.read(source)


@cache
def table(source: Path) -> ModuleType:
    """The wrong and right answers to the exercises in ``source``."""
    file = Path(__file__).parent / "exercises" / source.name
    if not file.exists():  # one notebook without a table must not keep the tests of the others from being collected
        return ModuleType("none")
    spec = importlib.util.spec_from_file_location(f"answers_{source.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def automatic(source: Path, exercise: int | None = None) -> int:
    """The points that checks give, in all or in one exercise."""
    return sum(cell.points for cell in assignment(source).of("check") if exercise in (None, cell.exercise))


def exercise_of(source: Path, name: str) -> int:
    return next(cell.exercise for cell in assignment(source).cells if cell.id == name)


# ---------------------------------------------------------------- right and blank


@each_notebook
def test_a_blank_notebook_runs_and_earns_nothing(source):
    for hidden in (True, False):
        done = run(assignment(source), hidden=hidden)
        assert done.broken == {}, "every supplied cell and every stub runs; only checks fail"
        assert done.points == 0
        passed = {name for name, result in done.results.items() if result.passed}
        assert not passed, "these pass although nothing is done yet"


@each_notebook
@pytest.mark.parametrize("secret", [b"", b"one", b"two"])
def test_the_solution_earns_everything_whatever_the_secret(source, secret):
    done = run(assignment(source), solution(assignment(source)), secret, prove=True)
    assert done.broken == {}
    assert {name: done[name].message for name in done.failed()} == {}
    assert done.points == automatic(source)


@each_notebook
def test_each_exercise_alone_earns_its_own_points(source):
    answers = solution(assignment(source))
    for exercise in assignment(source).exercises:
        own = {name: code for name, code in answers.items() if exercise_of(source, name) == exercise.number}
        done = run(assignment(source), own)
        assert done.points == automatic(source, exercise.number), exercise.title
        assert {exercise_of(source, name) for name in done.results if done[name].passed} <= {exercise.number}


# ---------------------------------------------------------------- answers that people give


def wrong_answers() -> list:
    return [pytest.param(source, wrong, id=f"{source.stem}-{wrong.check}-{number}")
            for source in SOURCES for number, wrong in enumerate(getattr(table(source), 'WRONG', []))]  # fmt: skip


@pytest.mark.parametrize(("source", "wrong"), wrong_answers())
def test_a_wrong_answer_is_told_its_misconception(source: Path, wrong: Wrong):
    number = exercise_of(source, wrong.answer)
    answers = {name: code for name, code in solution(assignment(source)).items() if exercise_of(source, name) == number}
    done = run(assignment(source), {**answers, wrong.answer: wrong.code}, secret=b"s", only=number, prove=True)
    assert wrong.check in done.failed(), "this wrong answer passes"
    message = done[wrong.check].message
    assert wrong.says.lower() in message.lower(), message
    assert all(f"{part} " in message for part in ("WHAT", "WHY", "TRY")), message
    blank = run(assignment(source), {**answers, wrong.answer: wrong.code}, hidden=False, only=number)
    assert wrong.says.lower() in blank[wrong.check].message.lower(), "the learner's own notebook says so, too"


def right_answers() -> list:
    return [pytest.param(source, right, id=f"{source.stem}-{right.answer}-{number}")
            for source in SOURCES for number, right in enumerate(getattr(table(source), 'RIGHT', []))]  # fmt: skip


@pytest.mark.parametrize(("source", "right"), right_answers())
def test_another_right_answer_passes(source: Path, right: Right):
    number = exercise_of(source, right.answer)
    answers = {name: code for name, code in solution(assignment(source)).items() if exercise_of(source, name) == number}
    done = run(assignment(source), {**answers, right.answer: right.code}, secret=b"s", only=number)
    assert done.points == automatic(source, number)
    assert done.broken == {}
    assert {name: done[name].message for name in done.failed()} == {}


@each_notebook
def test_every_exercise_has_two_wrong_answers_and_a_right_one(source):
    assert hasattr(table(source), "WRONG"), f"there is no table of answers tests/classroom/exercises/{source.name}"
    for exercise in assignment(source).exercises:
        graded = [cell for cell in assignment(source).of("check") if cell.exercise == exercise.number]
        if graded:
            wrong = [each for each in table(source).WRONG if exercise_of(source, each.answer) == exercise.number]
            right = [each for each in table(source).RIGHT if exercise_of(source, each.answer) == exercise.number]
            assert len(wrong) >= 2, exercise.title
            assert len(right) >= 1, exercise.title


NONSENSE = {
    "None": "None",
    "an object that equals everything": "type('Any', (), {'__eq__': lambda *_: True, '__hash__': lambda _: 1})()",
    "a float that equals everything": "type('Any', (float,), {'__eq__': lambda *_: True, '__sub__': lambda *_: 0.0})(-7.5)",
    "nan": "float('nan')",
    "an empty list": "[]",
    "text": "'all passed'",
    "an exit": "exit()",
    "an exception of its own": "(_ for _ in ()).throw(type('Mine', (Exception,), {'__str__': lambda _: 1 / 0})())",
}


@each_notebook
@pytest.mark.parametrize("value", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_earns_nothing_and_breaks_nothing(source, value):
    """Every function and method of every answer gives back the same nonsense."""
    answers = {cell.id: nonsense(cell.stub, value) for cell in assignment(source).of("answer")}
    done = run(assignment(source), {name: code for name, code in answers.items() if code})
    assert not {name for name in done.results if done[name].passed}


def nonsense(stub: str, value: str) -> str:
    tree = ast.parse(stub)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    for function in functions:
        function.body = ast.parse(f"return {value}").body
    return ast.unparse(tree) if functions else ""


# ---------------------------------------------------------------- the notebooks


@each_notebook
def test_the_grader_flags_no_honest_answer(source):
    honest = [solution(assignment(source)), *({each.answer: each.code} for each in [*table(source).RIGHT, *table(source).WRONG])]
    for answers in honest:
        work = Work(answers={name: [code] for name, code in answers.items()})
        assert flags(work, assignment(source)) + rebound(work, assignment(source)) == [], answers


@pytest.mark.parametrize("source", SOURCES[::3], ids=[source.stem for source in SOURCES[::3]])
def test_the_grader_gives_a_whole_notebook_all_its_points(source):
    """In a kernel, under nbval and the guard; blank it earns nothing there, too."""
    blank = grading.run(assignment(source), Work(), Limits(cell_s=60))
    assert not [name for name, verdict in blank.verdicts.items() if verdict.passed]
    work = Work(answers={name: [code] for name, code in solution(assignment(source)).items()})
    ran = grading.run(assignment(source), work, Limits(cell_s=60), secret=b"s")
    assert {name: verdict.message for name, verdict in ran.verdicts.items() if not verdict.passed} == {}
    assert (len(ran.verdicts), ran.broken, ran.taken_out) == (len(assignment(source).of("check")), {}, {})


@each_notebook
def test_notebooks_agree_with_their_source(source):
    assert exercises.check(source) == []


@each_notebook
def test_no_answer_needs_a_name_that_only_a_check_binds(source):
    def bound(*roles: str) -> set[str]:
        return set().union(*(exercises.names_bound(cell.whole) for cell in assignment(source).of(*roles)))

    only_checks = bound("check") - bound("given", "answer", "manual")
    for cell in assignment(source).of("answer"):
        assert not exercises.names_used(cell.whole) & only_checks, cell.id
