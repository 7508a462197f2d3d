"""What students get holds no solution and no hidden check; where it would, nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest

from minikv.classroom import __main__ as command
from minikv.classroom import exercises
from minikv.classroom.release import ROOT, ReleaseError, release

SOURCE = """\
# %% id="e90-setup" role="given"
from minikv.classroom.checks import check, expect, hidden_random, lock_minikv

lock_minikv()

# %% [markdown] id="one"
# ## Exercise 1. Twice
#
# *1 point, 5 minutes, easy*

# %% id="e90-double" role="answer"
def double(x):
    ### BEGIN SOLUTION: twice x
    return "the secret of the solution"
    ### END SOLUTION

# %% id="e90-double-two" role="check" points=1
with check("twice two", why="It is.", hint="Add."):
    expect(double(2), 4)
    ### BEGIN HIDDEN TESTS
    expect(double(3), "the secret of the check")
    ### END HIDDEN TESTS
"""


@pytest.fixture
def root(tmp_path) -> Path:
    """A small repository."""
    folder = tmp_path / "repository"
    (folder / "exercises" / "source").mkdir(parents=True)
    (folder / "exercises" / "source" / "90_x.py").write_text(SOURCE)
    source = folder / "exercises" / "source" / "90_x.py"
    nbformat.write(exercises.notebook(exercises.read(source), solved=False), exercises.stub_path(source))
    for name in ("chapters/source", "minikv/__pycache__", "solutions", "tests"):
        (folder / name).mkdir(parents=True)
    for name in ("README.md", "exercises/README.md", "chapters/01_x.ipynb", "chapters/source/01_x.py", "minikv/__init__.py",
                 "minikv/__pycache__/x.pyc", "solutions/90_x.ipynb", "tests/test_x.py", "grades.csv"):  # fmt: skip
        (folder / name).write_text("the secret of the teacher" if "minikv" not in name and "chapters/01" not in name else "")
    (folder / "README.md").write_text("A course")
    return folder


def test_students_get_the_course_and_no_solution(root, tmp_path):
    release(tmp_path / "out", root)
    found = {path.relative_to(tmp_path / "out").as_posix(): path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(found) == {"README.md", "chapters/01_x.ipynb", "exercises/90_x.ipynb", "minikv/__init__.py"}
    assert not [name for name, text in found.items() if "the secret of" in text]


def test_what_is_not_as_its_source_says_is_not_handed_out(root, tmp_path):
    stub = root / "exercises" / "90_x.ipynb"
    right = stub.read_text()
    for text, said in (
        (right.replace("NotImplementedError", "ValueError"), "cell e90-double: differs"),
        (right.replace("twice two", "### BEGIN SOLUTION"), "differs|BEGIN"),
    ):
        stub.write_text(text)
        with pytest.raises(ReleaseError, match=said):
            release(tmp_path / "out", root)
    stub.write_text(right)
    shutil.copy(root / "README.md", root / "exercises" / "mine.ipynb")
    with pytest.raises(ReleaseError, match="comes from no source"):
        release(tmp_path / "out", root)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.ipynb"))


def test_a_folder_that_is_there_is_left_alone(root, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ReleaseError, match="name a new folder"):
        release(tmp_path / "out", root)
    (root / "exercises" / "source" / "90_x.py").unlink()
    with pytest.raises(ReleaseError, match="from a clone"):
        release(tmp_path / "new", root)


def test_the_course_itself_can_be_handed_out(tmp_path, capsys):
    """Every solution and every hidden check is looked for in all that students get."""
    assert command.main(["release", "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert "no solutions" in capsys.readouterr().out
    top = {path.name for path in (tmp_path / "out").iterdir()}
    assert top == {"README.md", "LICENSE", "requirements.txt", "pyproject.toml", "docs", "chapters", "exercises", "minikv"}
    handed_out = [cell.source for path in (tmp_path / "out" / "exercises").iterdir() for cell in nbformat.read(path, as_version=4).cells]
    for source in sorted((ROOT / "exercises" / "source").glob("*.py")):
        for pattern in (exercises._SOLUTION, exercises._HIDDEN):
            for hidden in pattern.finditer(source.read_text()):
                body = hidden["body"].split("### STUB")[0].strip()
                if len(body.splitlines()) > 2:  # a line or two may well stand elsewhere, too
                    assert not [cell for cell in handed_out if body in cell], body
