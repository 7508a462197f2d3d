"""nbgrader takes our notebooks as they are, and passes and fails what our own grader does. Run where nbgrader is installed."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

import minikv
from minikv.classroom import exercises

pytestmark = pytest.mark.nbgrader
nbgrader = pytest.importorskip("nbgrader", reason="nbgrader is not installed (it is no part of the tests' requirements)")

SOURCES = sorted((Path(minikv.__file__).parent.parent / "exercises" / "source").glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_the_metadata_are_nbgraders(source):
    from nbgrader.nbgraderformat import MetadataValidator

    for solved in (False, True):
        notebook = exercises.notebook(exercises.read(source), solved)
        MetadataValidator().validate_nb(notebook)
        assert len([cell for cell in notebook.cells if "nbgrader" in cell.metadata]) > 5


def test_nbgrader_itself_passes_the_solution_and_fails_the_blank_notebook(tmp_path):
    from nbgrader.validator import Validator

    assignment = exercises.read(SOURCES[0])
    for solved in (True, False):
        nbformat.write(exercises.notebook(assignment, solved), tmp_path / f"{solved}.ipynb")
    validator = Validator()
    assert validator.validate(str(tmp_path / "True.ipynb")) == {}
    assert len(validator.validate(str(tmp_path / "False.ipynb"))["failed"]) == len(assignment.of("check"))
