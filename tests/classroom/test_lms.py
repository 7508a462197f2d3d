"""From the zip of a learning platform to the table of points, end to end: Moodle's and Canvas's names, late and repeated attempts."""

from __future__ import annotations

import csv
import json
import sys
import zipfile
from pathlib import Path

import pytest

from minikv.classroom import __main__ as command
from minikv.classroom import exercises

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the grader needs process groups and pipes: there it runs in a container")

SOURCE = """\
# %% id="e90-setup" role="given"
from minikv.classroom.checks import check, expect, lock_minikv

lock_minikv()

# %% [markdown] id="one"
# ## Exercise 1. Twice
#
# *2 points, 5 minutes, easy*

# %% id="e90-double" role="answer"
def double(x):
    ### BEGIN SOLUTION: twice x
    return 2 * x
    ### END SOLUTION

# %% id="e90-two" role="check" points=1
with check("two", why="It is.", hint="Add."):
    expect(double(2), 4)

# %% id="e90-any" role="check" points=1
with check("any", why="It is.", hint="Add."):
    expect(double(3), 6)
"""
RIGHT, HALF, WRONG = (f"def double(x):\n    return {answer}" for answer in ("x + x", "x * x", "0"))
MOODLE = {
    # as "Download all submissions" makes it; a folder for each, the name of the assignment's file within
    "Ada Lovelace_4711_assignsubmission_file_/90_x.ipynb": RIGHT,
    "Bob Ångström_4712_assignsubmission_file_/attempt1/90_x.ipynb": RIGHT,
    "Bob Ångström_4712_assignsubmission_file_/attempt2/90_x.ipynb": HALF,
}
CANVAS = {
    # a flat folder; LATE when it was, the user's and the file's number, and -N for what was handed in again
    "lovelaceada_1815_77001_90_x.ipynb": WRONG,
    "lovelaceada_LATE_1815_77009_90_x-1.ipynb": RIGHT,
    "angstrombob_LATE_1816_77002_90_x-2.ipynb": HALF,
    "angstrombob_1816_77003_90_x-1.ipynb": RIGHT,
    "angstrombob_1816_77004_notes.pdf": "no notebook",
}


def test_the_zips_of_moodle_and_of_canvas_are_graded_as_they_come(tmp_path):
    """The latest attempt wins, even where an earlier one has more points; who it is from is as the platform says."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "90_x.py").write_text(SOURCE)
    assignment = exercises.read(tmp_path / "source" / "90_x.py")
    zips = []
    for name, content in (("moodle", MOODLE), ("canvas", CANVAS)):
        zips.append(str(tmp_path / f"{name}.zip"))
        with zipfile.ZipFile(zips[-1], "w") as archive:
            for path, answer in content.items():
                notebook = exercises.notebook(assignment, solved=False)
                next(cell for cell in notebook.cells if cell.id == "e90-double").source = answer
                archive.writestr(path, json.dumps(notebook) if path.endswith("ipynb") else answer)
    arguments = ["--csv", f"{tmp_path}/grades.csv", "--feedback", f"{tmp_path}/feedback", "--jobs", "2"]
    assert command.main(["grade", str(assignment.source), *zips, *arguments]) == 0
    with (tmp_path / "grades.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = {row["submission"]: row for row in csv.DictReader(file)}
    totals = {name: (row["total"], row["status"], row["look at"]) for name, row in rows.items()}
    assert totals == {
        "Ada Lovelace_4711": ("2", "ok", ""),
        "Bob Ångström_4712": ("1", "ok", "1 more file from the same person"),
        "lovelaceada_1815": ("2", "ok", "1 more file from the same person"),
        "angstrombob_1816": ("1", "ok", "2 more files from the same person"),
    }
    pages = {path.relative_to(tmp_path / "feedback").as_posix() for path in (tmp_path / "feedback").rglob("*.html")}
    assert pages == {f"{row['file']}.html" for row in rows.values()}
    assert "Bob Ångström_4712_assignsubmission_file_/attempt2/90_x.ipynb.html" in pages
    page = Path(tmp_path / "feedback" / "angstrombob_LATE_1816_77002_90_x-2.ipynb.html").read_text(encoding="utf-8")
    assert "1 of 2 points" in page
