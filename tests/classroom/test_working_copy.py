"""A learner's copy: outputs cleared, found again, never written over."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

import minikv.__main__ as command
from minikv.classroom import working_copy
from minikv.classroom.working_copy import FIRST, copy_chapters
from minikv.cli import learn
from minikv.errors import RequestError


def chapter(path: Path, source: str, text: str = "print(1)") -> None:
    notebook = nbformat.v4.new_notebook(metadata={"minikv": {"source": f"source/{path.stem}.py", "source_sha256": source}})
    cell = nbformat.v4.new_code_cell(text, id="cell", execution_count=3, metadata={"tags": ["nbval-check-output"]})
    cell.outputs = [nbformat.v4.new_output("stream", text="the answer\n")]
    notebook.cells = [nbformat.v4.new_markdown_cell("# Words", id="words"), cell]
    nbformat.write(notebook, path)


@pytest.fixture
def chapters(tmp_path):
    folder = tmp_path / "chapters"
    (folder / "source").mkdir(parents=True)
    (folder / "source" / "00_start_here.py").write_text("# %%")
    chapter(folder / FIRST, "zero")
    chapter(folder / "01_one.ipynb", "one")
    (folder / "glossary.md").write_text("詞彙表\n", encoding="utf-8")
    (folder / "predictions.json").write_text("{}")
    return folder


@pytest.fixture
def mine(tmp_path):
    return tmp_path / "deep" / "course"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_first_copy_has_no_outputs_and_no_sources(chapters, mine):
    copied = copy_chapters(mine, chapters)
    assert copied.added == [FIRST, "01_one.ipynb", "glossary.md"]
    assert (copied.kept, copied.differing) == ([], {})
    assert sorted(contents(mine)) == sorted(copied.added)
    assert (mine / "glossary.md").read_text(encoding="utf-8") == "詞彙表\n"
    for name in (FIRST, "01_one.ipynb"):
        notebook, original = (nbformat.read(folder / name, as_version=4) for folder in (mine, chapters))
        nbformat.validate(notebook)
        assert b"the answer" not in (mine / name).read_bytes()
        assert b"the answer" in (chapters / name).read_bytes()
        assert (notebook.cells[1].outputs, notebook.cells[1].execution_count) == ([], None)
        assert [cell.source for cell in notebook.cells] == [cell.source for cell in original.cells]
        assert [cell.id for cell in notebook.cells] == ["words", "cell"]
        assert notebook.metadata == original.metadata
    (line,) = copied.report()
    assert str(mine) in line
    assert "3 files" in line


def test_a_second_call_finds_the_copy_and_changes_nothing(chapters, mine):
    copy_chapters(mine, chapters)
    chapter(mine / "01_one.ipynb", "one", "my_own_work = 1")
    (mine / "notes.txt").write_text("mine")
    before = contents(mine)
    copied = copy_chapters(mine, chapters)
    assert (copied.added, copied.differing) == ([], {})
    assert contents(mine) == before
    (line,) = copied.report()
    assert line.startswith("Found your copy")


def test_a_new_chapter_is_added_and_a_rewritten_one_is_named(chapters, mine):
    copy_chapters(mine, chapters)
    chapter(mine / "01_one.ipynb", "one", "my_own_work = 1")
    before = contents(mine)
    chapter(chapters / "01_one.ipynb", "one, rewritten")
    chapter(chapters / "02_two.ipynb", "two")
    (chapters / "glossary.md").write_text("more terms")
    copied = copy_chapters(mine, chapters)
    assert copied.added == ["02_two.ipynb"]
    assert contents(mine) == before | {"02_two.ipynb": (mine / "02_two.ipynb").read_bytes()}
    found, added, *differing = copied.report()
    assert "nothing in it was changed" in found
    assert "02_two.ipynb" in added
    advice = "Yours is kept as it is; to get the course's, rename or move yours and start again."
    assert differing == [
        f"01_one.ipynb has been rewritten since you copied it. {advice}",
        f"glossary.md differs from the course's. {advice}",
    ]
    (mine / "01_one.ipynb").rename(mine / "01_mine.ipynb")
    again = copy_chapters(mine, chapters)
    assert again.added == ["01_one.ipynb"], "and that is how one gets it"
    assert b"my_own_work" in (mine / "01_mine.ipynb").read_bytes()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"metadata": []}', b"\xff\xfe"])
def test_a_damaged_notebook_is_named_and_left_alone(chapters, mine, damage):
    copy_chapters(mine, chapters)
    (mine / "01_one.ipynb").write_bytes(damage)
    copied = copy_chapters(mine, chapters)
    assert copied.differing == {"01_one.ipynb": "cannot be read"}
    assert (mine / "01_one.ipynb").read_bytes() == damage


def test_a_link_or_folder_in_the_place_of_a_chapter_is_left_alone(chapters, mine):
    mine.mkdir(parents=True)
    (mine / "01_one.ipynb").symlink_to(mine / "elsewhere")
    (mine / FIRST).mkdir()
    copied = copy_chapters(mine, chapters)
    assert copied.added == ["glossary.md"]
    assert copied.differing == {FIRST: "cannot be read", "01_one.ipynb": "cannot be read"}
    assert not (mine / "elsewhere").exists()


def test_the_course_itself_is_no_place_to_work_in(chapters):
    before = contents(chapters / "source") | {FIRST: (chapters / FIRST).read_bytes()}
    with pytest.raises(RequestError, match="holds the course itself"):
        copy_chapters(chapters / "source" / "..", chapters)
    assert before == contents(chapters / "source") | {FIRST: (chapters / FIRST).read_bytes()}


def test_without_chapters_the_reason_is_given(tmp_path, mine):
    with pytest.raises(RequestError, match="clone"):
        copy_chapters(mine, tmp_path / "nothing")
    assert not mine.exists()


def test_a_file_is_no_folder(chapters, tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "course"):
        with pytest.raises(RequestError, match=r"is a file, or lies in one; choose another folder with --folder"):
            copy_chapters(folder, chapters)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named(chapters, mine, monkeypatch):
    """The error comes from the operating system; as root no folder is read-only, so it is raised in its place."""

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RequestError, match=r"course cannot be worked in: Permission denied; choose another"):
        copy_chapters(mine, chapters)


def test_nothing_is_left_of_a_file_that_could_not_be_written(chapters, mine, monkeypatch):
    """A full disk: half a notebook would be taken for the learner's from then on."""
    real = Path.open

    def full(self, mode="r", *arguments, **options):
        opened = real(self, mode, *arguments, **options)
        if mode == "x" and self.name == "01_one.ipynb":
            opened.write("half")

            def write(text):
                raise OSError(28, "No space left on device")

            opened.write = write
        return opened

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RequestError, match="No space left"):
        copy_chapters(mine, chapters)
    monkeypatch.undo()
    assert sorted(contents(mine)) == [FIRST]
    assert copy_chapters(mine, chapters).added == ["01_one.ipynb", "glossary.md"]


# ---------------------------------------------------------------- the command, JupyterLab replaced by another program


FAKE = """
import json, os, pathlib, signal, sys, time
pathlib.Path(os.environ["TOLD"]).write_text(json.dumps(sys.argv[1:]))
if os.environ["ENDS"] == "ctrl-c":
    def stop(*_):
        time.sleep(0.5)  # the kernels are shut down
        pathlib.Path(os.environ["TOLD"]).write_text("shut down")
        sys.exit(0)
    signal.signal(signal.SIGINT, stop)
    time.sleep(30)
if os.environ["ENDS"] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(os.environ["ENDS"]))
"""


@pytest.fixture
def jupyterlab(tmp_path, chapters, monkeypatch):
    """A program called jupyterlab that notes how it was called and ends as it is told to."""
    (tmp_path / "fake" / "jupyterlab").mkdir(parents=True)
    (tmp_path / "fake" / "jupyterlab" / "__init__.py").touch()
    (tmp_path / "fake" / "jupyterlab" / "__main__.py").write_text(FAKE)
    told = tmp_path / "told.json"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.setattr(working_copy, "CHAPTERS", chapters)
    monkeypatch.chdir(tmp_path)
    return told


@pytest.mark.parametrize(("ends", "status"), [("0", 0), ("7", 7), ("killed", 137)])
def test_the_exit_status_of_jupyterlab_is_passed_on(jupyterlab, monkeypatch, ends, status, capsys):
    monkeypatch.setenv("ENDS", ends)
    before = signal.getsignal(signal.SIGINT)
    assert command.main(["learn", "--no-browser"]) == status
    assert signal.getsignal(signal.SIGINT) == before
    told = jupyterlab.read_text()
    assert '"--ServerApp.ip=127.0.0.1"' in told
    assert f'"--ServerApp.root_dir={Path.cwd() / "course"}"' in told
    assert f'"--LabApp.default_url=/lab/tree/{FIRST}"' in told
    assert '"--no-browser"' in told
    assert (Path("course") / FIRST).exists()
    assert "3 files" in capsys.readouterr().out


def test_without_an_option_a_browser_is_opened(jupyterlab, monkeypatch):
    monkeypatch.setenv("ENDS", "0")
    assert command.main(["learn", "--folder", "my folder"]) == 0
    assert "--no-browser" not in jupyterlab.read_text()
    assert (Path("my folder") / FIRST).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups to send a Ctrl-C to")
def test_ctrl_c_ends_quietly_once_jupyterlab_has_ended(jupyterlab, chapters):
    code = f"""
import pathlib, sys, minikv.__main__ as command
from minikv.classroom import working_copy
working_copy.CHAPTERS = pathlib.Path({str(chapters)!r})
sys.exit(command.main(["learn"]))
"""
    learning = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "ENDS": "ctrl-c"}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not jupyterlab.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    os.killpg(learning.pid, signal.SIGINT)
    out, err = learning.communicate(timeout=30)
    assert (learning.returncode, err) == (0, "")
    assert "Traceback" not in out
    assert jupyterlab.read_text() == "shut down"


def test_what_is_missing_is_said_in_one_line(jupyterlab, chapters, monkeypatch, capsys):
    monkeypatch.setattr(learn, "find_spec", lambda name: None)
    assert command.main(["learn"]) == 2
    assert "JupyterLab is not installed" in capsys.readouterr().err
    monkeypatch.undo()
    shutil.rmtree(chapters)
    monkeypatch.setattr(working_copy, "CHAPTERS", chapters)
    assert command.main(["learn"]) == 2
    assert "no chapters" in capsys.readouterr().err
    assert not jupyterlab.exists()


def test_the_real_chapters_can_be_copied(tmp_path):
    copied = copy_chapters(tmp_path / "course")
    assert FIRST in copied.added
    assert "glossary.md" in copied.added
    assert not list((tmp_path / "course").glob("*.py"))
    assert copy_chapters(tmp_path / "course").differing == {}
