"""What students get holds no solution and no hidden check; where it would, nothing is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
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


PROJECT = """\
[build-system]
requires = ["x"]

[project]
name = "y"

[project.optional-dependencies]
test = ["pytest"]

[tool.setuptools.package-data]
a = ["b"]

[[tool.mypy.overrides]]
module = ["c"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""


@pytest.fixture
def root(tmp_path) -> Path:
    """A small repository."""
    folder = tmp_path / "repository"
    (folder / "exercises" / "source").mkdir(parents=True)
    (folder / "exercises" / "source" / "90_x.py").write_text(SOURCE)
    source = folder / "exercises" / "source" / "90_x.py"
    nbformat.write(exercises.notebook(exercises.read(source), solved=False), exercises.stub_path(source))
    for name in ("README.md", "exercises/README.md", "chapters/source/01_x.py", "solutions/90_x.ipynb", "tests/test_x.py", "grades.csv",
                 "minikv/__pycache__/x.pyc", "minikv/classroom/grade.py", "minikv/classroom/grading/guard.py",
                 "minikv/classroom/new.py"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("the secret of the teacher")
    for name in ("chapters/01_x.ipynb", "minikv/__init__.py", "minikv/grading/x.py", "minikv/classroom/checks.py",
                 "minikv/classroom/explorers/new.py"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "exercises" / "students.md").write_text("Start here")
    (folder / "chapters" / "claims.md").write_text("Figures.\nThis page is written by `python -m minikv.classroom build chapters`.\nMore.")
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


def test_students_get_the_course_and_no_solution(root, tmp_path):
    release(tmp_path / "out", root)
    found = {path.relative_to(tmp_path / "out").as_posix(): path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    package = {f"minikv/{name}.py" for name in ("__init__", "grading/x", "classroom/checks", "classroom/explorers/new")}
    pages = {"README.md", "chapters/claims.md", "pyproject.toml"}
    assert set(found) == {*pages, "chapters/01_x.ipynb", "exercises/90_x.ipynb", *package}
    assert not [name for name, text in found.items() if "the secret of" in text]
    assert (found["README.md"], found["chapters/claims.md"]) == ("Start here", "Figures.\nMore.")
    tables = '[build-system]\nrequires = ["x"]\n\n[project]\nname = "y"\n\n[tool.setuptools.package-data]\na = ["b"]\n'
    assert found["pyproject.toml"] == tables


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


# ---------------------------------------------------------------- the course itself


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """The course's own bundle, packed and unpacked as a student does it."""
    made = tmp_path_factory.mktemp("made")
    release(made / "bundle")
    shutil.make_archive(str(made / "packed"), "zip", made, "bundle")
    shutil.unpack_archive(made / "packed.zip", made / "unpacked")
    return made / "unpacked" / "bundle"


def test_the_course_itself_can_be_handed_out(tmp_path, capsys):
    assert command.main(["release", "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert "no solutions" in capsys.readouterr().out
    top = {path.name for path in (tmp_path / "out").iterdir()}
    assert top == {"README.md", "LICENSE", "requirements.txt", "pyproject.toml", "chapters", "exercises", "minikv"}


def test_no_solution_and_no_hidden_check_is_in_it(bundle):
    """Every solution and every hidden check is looked for in all exercises that students get."""
    handed_out = [cell.source for path in (bundle / "exercises").iterdir() for cell in nbformat.read(path, as_version=4).cells]
    for source in sorted((ROOT / "exercises" / "source").glob("*.py")):
        for pattern in (exercises._SOLUTION, exercises._HIDDEN):
            for hidden in pattern.finditer(source.read_text()):
                body = hidden["body"].split("### STUB")[0].strip()
                if len(body.splitlines()) > 2:  # a line or two may well stand elsewhere, too
                    assert not [cell for cell in handed_out if body in cell], body


NOT_IN_IT = re.compile(
    r"python -m minikv\.classroom(?!\.explorers)|exercises/source|chapters/source|solutions/|exercises/README|\btests/|test_\w+\.py"
)


def texts(bundle: Path) -> dict[str, str]:
    """What a student can read: pages, code, and the cells of notebooks."""
    pages = [path for kind in ("py", "md", "toml", "txt") for path in bundle.rglob(f"*.{kind}")]
    found = {path.relative_to(bundle).as_posix(): path.read_text(encoding="utf-8") for path in pages}
    for path in bundle.rglob("*.ipynb"):
        found[path.relative_to(bundle).as_posix()] = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    return found


def test_it_speaks_of_nothing_that_is_not_in_it(bundle):
    for name, text in texts(bundle).items():
        assert not NOT_IN_IT.search(text), name
        for link in re.findall(r"\]\(([\w./-]+\.(?:ipynb|md|png))\b", text) if name.endswith((".md", ".ipynb")) else ():
            assert (bundle / name).parent.joinpath(link).exists(), f"{name}: {link}"
        for module in re.findall(r"^\s*(?:from|import) (minikv(?:\.\w+)*)", text, re.MULTILINE):
            path = bundle.joinpath(*module.split("."))
            assert path.with_suffix(".py").exists() or path.is_dir(), f"{name} imports {module}"


def test_a_student_can_install_it_and_is_told_how_to_start(bundle):
    project = tomllib.loads((bundle / "pyproject.toml").read_text())
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"] == {key: value for key, value in whole["project"].items() if key != "optional-dependencies"}
    assert project["tool"] == {"setuptools": whole["tool"]["setuptools"]}
    start = (bundle / "README.md").read_text()
    assert "pip install -r requirements.txt" in start
    for told in re.findall(r"exercises/\w+\.ipynb", start):
        assert (bundle / told).exists()


def test_a_chapter_and_an_exercise_run_in_it_alone(bundle):
    """Through nbval, with nothing of ours on the path but the bundle; the exercise is solved."""
    solved = nbformat.read(ROOT / "solutions" / "05_pages.ipynb", as_version=4)
    nbformat.write(solved, bundle / "exercises" / "solved.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "--nbval-lax", "--nbval-current-env", "-rA",
         "chapters/04_the_car_park.ipynb", "exercises/solved.ipynb"],
        cwd=bundle, env={**os.environ, "PYTHONPATH": str(bundle)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    asked = subprocess.run([sys.executable, "-c", "import minikv; print(minikv.__file__)"], cwd=bundle / "exercises", text=True,
                           env={**os.environ, "PYTHONPATH": str(bundle)}, capture_output=True, check=True)  # fmt: skip
    assert Path(asked.stdout.strip()).parent == bundle / "minikv"
    listed = subprocess.run([sys.executable, "-m", "minikv", "--help"], cwd=bundle, env={**os.environ, "PYTHONPATH": str(bundle)},
                            capture_output=True, text=True, check=True)  # fmt: skip
    assert "learn" in listed.stdout
