"""A source of exercises becomes two notebooks; a source in which something does not fit is refused, and told where."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from minikv.classroom import __main__ as command
from minikv.classroom import exercises, misconceptions
from minikv.classroom.build import BuildError
from minikv.classroom.rehearse import run, solution

GOOD = '''\
# %% [markdown] id="title"
# # Exercises 90

# %% id="e90-setup" role="given"
from minikv.classroom.checks import check, expect, hidden_random, lock_minikv

lock_minikv()

# %% [markdown] id="one"
# ## Exercise 1. Twice
#
# *2 points, 5 minutes, easy*

# %% id="e90-double" role="answer"
def double(x):
    """Twice x."""
    ### BEGIN SOLUTION: say "twice"
    return 2 * x
    ### END SOLUTION


### BEGIN SOLUTION
two = 2
### STUB
# two = ...
#
# # think
### END SOLUTION

# %% id="e90-double-two" role="check" points=2
with check("twice two", why="It is.", hint="Add."):
    expect(double(two), 4, mistakes={"That is the square.": 5})
    ### BEGIN HIDDEN TESTS
    expect(double(hidden_random().randint(5, 9)) % 2, 0)
    ### END HIDDEN TESTS

# %% [markdown] id="two"
# ## Exercise 2. Why
#
# *3 points, 5 minutes, hard*

# %% [markdown] id="why" role="manual" points=3
# Because.
'''


def source(folder: Path, text: str = GOOD) -> Path:
    (folder / "exercises" / "source").mkdir(parents=True, exist_ok=True)
    (folder / "exercises" / "source" / "90_x.py").write_text(text)
    return folder / "exercises" / "source" / "90_x.py"


def test_a_stub_keeps_what_is_around_the_solution(tmp_path):
    cells = {cell.id: cell for cell in exercises.read(source(tmp_path)).cells}
    stub = cells["e90-double"].stub
    assert stub.startswith('def double(x):\n    """Twice x."""\n    raise NotImplementedError(\'say "twice"\')\n')
    assert stub.endswith("\ntwo = ...\n\n# think")
    assert cells["e90-double"].whole.endswith("return 2 * x\n\n\ntwo = 2")
    assert cells["e90-double-two"].stub.endswith("    # (Here the grader checks more, with inputs of its own.)")
    assert "###" not in cells["e90-double-two"].whole
    assert [cell.exercise for cell in cells.values()] == [None, None, 1, 1, 1, 2, 2]


def test_exercises_are_announced_with_points_minutes_and_difficulty(tmp_path):
    assignment = exercises.read(source(tmp_path))
    assert assignment.exercises[0] == exercises.Exercise(1, "Twice", 2, 5, "easy")
    assert assignment.points == 5


def test_an_ungraded_exercise_has_checks_and_no_points(tmp_path):
    text = GOOD.replace("*2 points, 5", "*ungraded, 5").replace(' role="check" points=2', ' role="check"')
    assignment = exercises.read(source(tmp_path, text))
    assert [exercise.points for exercise in assignment.exercises] == [0, 3]
    assert [exercise.number for exercise in assignment.graded] == [2]
    made = {cell.id: cell.metadata.get("nbgrader") for cell in exercises.notebook(assignment, solved=False).cells}
    assert made["e90-double-two"]["grade"] is False
    assert made["e90-double-two"]["locked"] is True
    assert "points" not in made["e90-double-two"]
    done = run(assignment, solution(assignment))
    assert (done["e90-double-two"].passed, done.points) == (True, 0)
    assert run(assignment).failed() == {"e90-double-two"}
    assert "**1. Twice** (ungraded, 5 minutes)" in misconceptions.page(tmp_path / "exercises")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lock_minikv()\n", "\n", "first code cell is given"),
        ('role="given"', 'role="gift"', "no role is called 'gift'"),
        (' role="given"', "", "a code cell has a role"),
        ("e90-double-two", "double-two", "its id begins with e90-"),
        ("*2 points, 5 minutes, easy*", "*3 points, 5 minutes, easy*", "exercise 1 announces 3 points; its cells have 2"),
        ("*2 points, 5 minutes, easy*", "*2 points, easy*", "stands before the first exercise"),
        ("## Exercise 2.", "## Exercise 3.", "exercises are numbered"),
        (" points=2", "", "e90-double-two: checks and manual work have points=N, unless"),
        ("*2 points, 5 minutes, easy*", "*ungraded, 5 minutes, easy*", "e90-double-two: .* unless the heading of their exercise says"),
        ('role="answer"', 'role="answer" points=1', "points=N, a number from 1 on, and nothing else has"),
        ("    ### END SOLUTION\n\n\n###", "\n\n###", "line|partner|SOLUTION"),
        ('### BEGIN SOLUTION: say "twice"', "### BEGIN SOLUTION", "write '### BEGIN SOLUTION: what to do'"),
        ("# two = ...", "two = ...", "below ### STUB begins with #"),
        ("    return 2 * x", "    return 2 *", "cell e90-double: line"),
        ("    ### END HIDDEN TESTS", "", "a ### marker has no partner"),
        ("    expect(double(two)", "    check = 3\n    expect(double(two)", "binds check, which a given cell defines"),
        (' role="manual" points=3', ' role="check" points=3', "a Markdown cell cannot be check"),
    ],
)
def test_a_source_in_which_something_does_not_fit_is_refused(tmp_path, old, new, said):
    assert old in GOOD
    with pytest.raises(BuildError, match=re.escape("90_x.py") + f".*({said})"):
        exercises.read(source(tmp_path, GOOD.replace(old, new, 1)))


def test_the_metadata_are_those_of_nbgrader_3(tmp_path):
    made = {cell.id: cell.metadata.get("nbgrader") for cell in exercises.notebook(exercises.read(source(tmp_path)), solved=False).cells}
    common = {"schema_version": 3, "task": False}
    assert made["title"] is None
    assert made["e90-setup"] == {**common, "grade_id": "e90-setup", "grade": False, "solution": False, "locked": True}
    assert made["e90-double"] == {**common, "grade_id": "e90-double", "grade": False, "solution": True, "locked": False}
    assert made["e90-double-two"] == {**common, "grade_id": "e90-double-two", "grade": True, "solution": False, "locked": True, "points": 2}
    assert made["why"] == {**common, "grade_id": "why", "grade": True, "solution": True, "locked": False, "points": 3}


def test_both_notebooks_are_built_and_held_against_the_source(tmp_path, capsys):
    file = source(tmp_path)
    folder = str(tmp_path / "exercises")
    assert command.main(["build", "--check", folder]) == 1
    assert "has not been built" in capsys.readouterr().err
    assert command.main(["build", folder]) == 0
    assert command.main(["build", "--check", folder]) == 0
    stub, solved = (nbformat.read(path, as_version=4) for path in (exercises.stub_path(file), exercises.solution_path(file)))
    assert "- That is the square.\n" in (tmp_path / "exercises" / "common_wrong_answers.md").read_text()
    assert exercises.solution_path(file) == tmp_path / "solutions" / "90_x.ipynb"
    assert [cell.source for cell in stub.cells][-1] == "*Write here.*"
    assert [cell.source for cell in solved.cells][-1] == "Because."
    assert {cell.execution_count for cell in stub.cells if cell.cell_type == "code"} == {None}
    assert [cell.execution_count for cell in solved.cells if cell.cell_type == "code"] == [1, 2, 3]
    stub.cells[3].source += "\n# mine"
    nbformat.write(stub, exercises.stub_path(file))
    assert command.main(["build", "--check", folder]) == 1
    assert "90_x.ipynb, cell e90-double: differs" in capsys.readouterr().err


def test_a_solution_that_fails_its_checks_is_not_built(tmp_path, capsys):
    source(tmp_path, GOOD.replace("return 2 * x", "return 3 * x"))
    assert command.main(["build", str(tmp_path / "exercises")]) == 1
    assert "6 instead of 4" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.ipynb"))


def test_a_rehearsal_takes_answers_by_name(tmp_path):
    file = source(tmp_path)
    assert run(file).points == 0
    assert run(file, solution(exercises.read(file))).points == 2
    half = run(file, {"e90-double": "def double(x):\n    return 4\n\ntwo = 2"})
    assert half["e90-double-two"].passed, "4 is even: this hidden check is a weak one"
    assert run(file, {"e90-double": "two = 2\ndouble = lambda x: 5"}).failed() == {"e90-double-two"}
    assert "SyntaxError" in run(file, {"e90-double": "def"}).broken["e90-double"]
    with pytest.raises(ValueError, match="no answer called e90-nosuch"):
        run(file, {"e90-nosuch": ""})


def test_names_are_those_that_python_itself_would_look_up():
    code = "import os.path\nfor i in range(3):\n    y = i\ndef f(q):\n    return q + z\nclass C:\n    w = 1"
    assert exercises.names_bound(code) == {"os", "i", "y", "f", "C"}
    assert {"range", "z", "i"} <= exercises.names_used(code)
    assert "q" not in exercises.names_used(code)
    assert exercises.names_bound("def") == exercises.names_used("%magic") == set()
    code = "del a\nb = 1\ndef f():\n    global c\n    c = d = 1\n    del e\nclass C:\n    g = 1"
    assert exercises.names_changed(code) == {"a", "b", "c", "f", "C"}
