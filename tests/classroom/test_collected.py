"""The README's test command runs the chapters: with this project's own pytest settings, what should fail fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

import minikv
from minikv.classroom.build import CHECKED, KERNEL

ROOT = Path(minikv.__file__).parent.parent


def notebook(path: Path, *cells: tuple[str, str]) -> None:
    """Each cell is its code and the stored output, which is checked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = nbformat.v4.new_notebook(metadata=KERNEL)
    for place, (code, stored) in enumerate(cells):
        cell = nbformat.v4.new_code_cell(code, id=f"cell-{place}", execution_count=1, metadata={"tags": [CHECKED]})
        cell.outputs = [nbformat.v4.new_output("stream", text=stored)]
        made.cells.append(cell)
    nbformat.write(made, path)


def test_a_cell_that_fails_and_an_output_that_differs_fail_and_a_learners_copy_is_not_run(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("def test_one():\n    pass\n")
    good, wrong, failing = ("print(1)", "1\n"), ("print(1)", "2\n"), ("assert 1 == 2", "")
    here = ('import pathlib\nprint(pathlib.Path.cwd().name, pathlib.Path("beside").read_text())', "chapters me\n")
    notebook(tmp_path / "chapters" / "01_x.ipynb", good, wrong, failing, here)
    (tmp_path / "chapters" / "beside").write_text("me")
    for folder in ("course", ".ipynb_checkpoints", "chapters/.ipynb_checkpoints"):
        notebook(tmp_path / folder / "01_x.ipynb", failing)
    for arguments in ((), (".",)):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--color=no", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        said = sorted(line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR")))
        assert [line.replace("::chapters/01_x.ipynb", "") for line in said] == [
            "FAILED chapters/01_x.ipynb::Cell 1", "FAILED chapters/01_x.ipynb::Cell 2",
            "PASSED chapters/01_x.ipynb::Cell 0", "PASSED chapters/01_x.ipynb::Cell 3", "PASSED tests/test_one.py::test_one",
        ], done.stdout  # fmt: skip
        assert "encryption" not in done.stdout + done.stderr
        assert done.returncode == 1
