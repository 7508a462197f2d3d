"""From verdicts to points and pages: a teacher's own decisions, void checks, ungraded exercises, and names that an answer binds anew."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest

from minikv.classroom import __main__ as command
from minikv.classroom import exercises
from minikv.classroom.exercises import Assignment
from minikv.classroom.grading import feedback, marks
from minikv.classroom.grading.marks import Mark, MarksError
from minikv.classroom.grading.rebound import changed, rebound
from minikv.classroom.grading.run import Ran, Verdict
from minikv.classroom.grading.submissions import Handed, Work
from minikv.classroom.words import an, counted

SOURCE = """\
# %% id="e90-setup" role="given"
import math
import numpy as np

from minikv.classroom.checks import check, expect, lock_minikv

held_rows = 4
lock_minikv()

# %% [markdown] id="one"
# ## Exercise 1. Twice
#
# *3 points, 5 minutes, easy*

# %% id="e90-double" role="answer"
def double(x):
    ### BEGIN SOLUTION: twice x
    return 2 * x
    ### END SOLUTION

# %% id="e90-two" role="check" points=1
with check("two", why="It is.", hint="Add."):
    expect(double(2), 4)

# %% id="e90-any" role="check" points=2
with check("any", why="It is.", hint="Add."):
    expect(double(3), 6)

# %% [markdown] id="two"
# ## Exercise 2. Thrice
#
# *ungraded, 5 minutes, easy*

# %% id="e90-triple" role="answer"
def triple(x):
    ### BEGIN SOLUTION: thrice x
    return 3 * x
    ### END SOLUTION

# %% id="e90-three" role="check"
with check("three", why="It is.", hint="Add."):
    expect(triple(3), 9)

# %% [markdown] id="three"
# ## Exercise 3. Why
#
# *2 points, 5 minutes, easy*

# %% [markdown] id="why" role="manual" points=2
# Because.
"""
FAILS = Verdict(False, "WHAT  any\n      5 instead of 6", False)


@pytest.fixture
def assignment(tmp_path) -> Assignment:
    (tmp_path / "90_x.py").write_text(SOURCE)
    return exercises.read(tmp_path / "90_x.py")


def marked(assignment: Assignment, who: str = "ada", void: tuple[str, ...] = ()) -> Mark:
    """Two is right, any is wrong, three is right."""
    handed = Handed(who, PurePosixPath(f"{who}.ipynb"), b"", (0.0,))
    ran = Ran(verdicts={"e90-two": Verdict(True, "", False), "e90-any": FAILS, "e90-three": Verdict(True, "", False)})
    return marks.mark(assignment, handed, Work(), ran, void, stale=False)


def overridden(assignment: Assignment, *lines: str, void: tuple[str, ...] = ()) -> tuple[Mark, list[str]]:
    """Ada's mark after overrides of these lines, and what the teacher is told."""
    path = assignment.source.with_suffix(".csv")
    path.write_text("submission,exercise,points,reason\n" + "\n".join(lines) + "\n")
    ada = marked(assignment, void=void)
    return ada, marks.apply(marks.read_overrides(path, assignment), [ada])


def text(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", page.split("</style>")[1])


# ---------------------------------------------------------------- the teacher's decisions


def test_points_are_those_of_the_checks_that_passed_and_count(assignment):
    assert (marked(assignment).points, marked(assignment).maximum) == ({1: 1.0, 3: 0.0}, 3)
    void = marked(assignment, void=("e90-any",))
    assert (void.points, void.maximum) == ({1: 1.0, 3: 0.0}, 1)
    unreadable = marks.unreadable(assignment, Handed("bob", PurePosixPath("b"), b"", (0.0,)), "empty", ("e90-two",))
    assert (unreadable.points, unreadable.maximum, unreadable.status) == ({1: 0.0, 3: 0.0}, 2, "unreadable")


def test_an_override_counts_in_place_of_the_checks_and_nothing_is_said_about_it(assignment):
    ada, told = overridden(assignment, "ada,1,2.5,nearly")
    assert (ada.points[1], ada.total, told) == (2.5, 2.5, [])
    assert "exercise 1: 1 -> 2.5 (nearly)" in ada.look_at


def test_more_points_than_the_exercise_has_are_given_and_said(assignment):
    ada, told = overridden(assignment, "ada,1,5,a proof besides")
    assert ada.total == 5
    assert told == ["the override for ada, exercise 1, gives 5 points, but its checks can give only 3 points; it counts as it is"]
    assert "exercise 1: 1 -> 5 (a proof besides), more than its 3 points" in ada.look_at
    assert "of 3 points instead" not in text(feedback.page(ada, assignment, ()))


def test_an_override_of_an_exercise_with_a_void_check_is_said(assignment):
    ada, told = overridden(assignment, "ada,1,1,half", void=("e90-any",))
    assert (ada.total, ada.maximum) == (1, 1)
    assert told == [
        "the override for ada, exercise 1, stands for the whole exercise, so that e90-any being void takes nothing from it: "
        "is it meant to be of 1 point?"
    ]
    assert len(overridden(assignment, "ada,1,2,nearly", void=("e90-any",))[1]) == 2
    assert overridden(assignment, "ada,3,1,a good reason", void=("e90-any",))[1] == [
        "the override for ada, exercise 3, gives 1 point, but its checks can give only 0 points; it counts as it is"
    ]


def test_an_override_fits_a_submission_and_an_exercise_with_points(assignment):
    assert overridden(assignment, "zoe,1,1,")[1] == ["the override for zoe, exercise 1, fits no submission"]
    for exercise in (2, 4):
        with pytest.raises(MarksError, match=f"there is no exercise {exercise} with points"):
            overridden(assignment, f"ada,{exercise},1,")


# ---------------------------------------------------------------- feedback


def test_the_learner_reads_the_decision_its_reason_and_the_total_that_counts(assignment):
    ada, _ = overridden(assignment, "ada,1,2.5,right <here>")
    page = feedback.page(ada, assignment, ())
    assert "90_x: 2.5 of 3 points" in text(page)
    assert "Exercise 1. Twice: 2.5 points" in text(page)
    assert "Decided by a person, in place of the checks below: 2.5 of 3 points. Reason: right &lt;here&gt;." in text(page)
    assert "e90-two: passed" in text(page)
    assert "e90-any: not passed WHAT  any" in text(page)
    assert not re.search(r"e90-\w+: \d", page), "the points of checks that no longer count"


def test_without_a_decision_each_check_says_its_points(assignment):
    said = text(feedback.page(marked(assignment, void=("e90-two",)), assignment, ("e90-two",)))
    assert "e90-two: does not count" in said
    assert "e90-any: 0 of 2" in said
    assert "Decided" not in said


def test_an_ungraded_exercise_tells_right_from_wrong_and_has_no_points(assignment):
    said = text(feedback.page(marked(assignment), assignment, ()))
    assert "Exercise 2. Thrice: ungraded" in said
    assert "e90-three: passed" in said
    assert "why: read by a person (2 points)" in said
    ada = marked(assignment)
    marks.write_csv(assignment.source.with_suffix(".grades"), assignment, [ada], (), {})
    header = assignment.source.with_suffix(".grades").read_text(encoding="utf-8-sig").splitlines()[0]
    assert header.startswith("submission,1 Twice,3 Why,total,maximum,by hand (of 2),")


def test_a_notebook_without_points_is_not_graded(tmp_path, capsys):
    ungraded = re.sub(r" points=\d+(?=\nwith)", "", SOURCE[: SOURCE.index('# %% [markdown] id="three"')]).replace("3 points", "ungraded")
    (tmp_path / "90_x.py").write_text(ungraded)
    (tmp_path / "a.ipynb").write_text("{}")
    assert command.main(["grade", str(tmp_path / "90_x.py"), str(tmp_path / "a.ipynb"), "--csv", str(tmp_path / "g.csv")]) == 1
    assert "90_x.py is ungraded: its checks tell right from wrong and give no points" in capsys.readouterr().err
    assert not (tmp_path / "g.csv").exists()


# ---------------------------------------------------------------- names that an answer binds anew


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("check = None", {"check"}),
        ("def double(x):\n    return 2 * x\n\nexpect = lambda *_: None", {"expect"}),
        ("def held_rows():\n    pass", {"held_rows"}),
        ("class np:\n    pass", {"np"}),
        ("del check, expect", {"check", "expect"}),
        ("for held_rows in range(3):\n    pass", {"held_rows"}),
        ("from math import prod as expect", {"expect"}),
        ("import torch as np", {"np"}),
        ("def double(x):\n    global check\n    check = None\n    return 4", {"check"}),
        ("with open('x') as (held_rows, y):\n    pass", {"held_rows"}),
        ("import math\nimport numpy as np\nimport re\n\ndef double(x):\n    check = held_rows = x\n    return 2 * check", set()),
        ("class A:\n    check = 1\n\n[expect for expect in range(3)]", set()),
        ("def double(held_rows):\n    return 2 * held_rows", set()),
        ("def", set()),
    ],
)  # fmt: skip
def test_names_of_the_notebook_that_an_answer_binds_are_named(assignment, code, names):
    found = rebound(Work(answers={"e90-double": [code]}), assignment)
    wanted = f"e90-double binds or deletes {', '.join(sorted(names))}, which the notebook gives"
    assert found == ([wanted] if names else [])


def test_an_added_cell_is_looked_at_as_well_and_the_row_says_so(assignment):
    work = Work(added=[("e90-setup", "check = expect = None")])
    said = "a cell added after e90-setup binds or deletes check, expect, which the notebook gives"
    assert rebound(work, assignment) == [said]
    handed = Handed("ada", PurePosixPath("a.ipynb"), b"", (0.0,))
    assert said in marks.mark(assignment, handed, work, Ran(), (), stale=False).look_at
    assert changed("import os\nfrom math import prod", same=[("prod", "math.prod")]) == {"os"}


@pytest.mark.parametrize(
    "source", sorted((Path(marks.__file__).parents[3] / "exercises" / "source").glob("*.py")), ids=lambda path: path.stem
)
def test_the_solutions_bind_nothing_that_is_given(source):
    assignment = exercises.read(source)
    answers = {cell.id: [cell.whole] for cell in assignment.of("answer")}
    assert rebound(Work(answers=answers), assignment) == []


# ---------------------------------------------------------------- words


def test_one_is_not_plural_and_an_int_is_not_a_int():
    assert [counted(number, "point") for number in (0, 1, 1.0, 1.5, 2)] == ["0 points", "1 point", "1 point", "1.5 points", "2 points"]
    assert (counted(1, "entry", "entries"), counted(3, "entry", "entries")) == ("1 entry", "3 entries")
    assert [an(noun) for noun in ("int", "list", "OrderedDict", "")] == ["an int", "a list", "an OrderedDict", "a "]
