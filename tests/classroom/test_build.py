"""Sources become notebooks, and notebooks that have come apart from source or engine are found."""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path

import nbformat
import pytest

from minikv.classroom import __main__ as command
from minikv.classroom import audits, build
from minikv.classroom.build import BuildError, check, read, target

GOOD = """\
# %% [markdown]
# # 4. A small chapter

# %% id="setup"
import matplotlib.pyplot as plt
from minikv.cache.blocks import blocks_for
from minikv.classroom.notebook import claim, compare, explore, predict, show_source
from minikv.show.widgets import Picture, Slider

plt.style.use("minikv.show.course")

# %% [markdown] id="words"
# Some words,

# %% [markdown]
# and some more.

# %% id="exact" tags=["nbval-check-output"]
print(blocks_for(5, 4))

# %% id="figure"
fig, ax = plt.subplots()
ax.plot([1, 2, 3])
plt.show()

# %% id="guess"
predict("x", "How many?", "blocks")

# %% id="widget"
def draw(count):
    figure, axes = plt.subplots(figsize=(2, 1))
    axes.bar(range(count), range(count))
    return Picture(figure, f"{count} bars")

explore(draw, count=Slider("Bars", [1, 2, 3], 2))

# %% id="result"
compare("x", 2, "blocks")

# %% id="engine"
show_source(blocks_for)

# %% id="audit"
claim("924-of-1024", 924)
"""


def source(folder: Path, text: str, name: str = "04_small.py") -> Path:
    (folder / "source").mkdir(parents=True, exist_ok=True)
    file = folder / "source" / name
    file.write_text(text)
    return file


# ---------------------------------------------------------------- reading a source


def test_cells_have_names_that_outlive_edits(tmp_path):
    notebook = read(source(tmp_path, GOOD))
    kinds = [(cell.id, cell.cell_type) for cell in notebook.cells]
    assert kinds[:5] == [("start-2", "markdown"), ("setup", "code"), ("words", "markdown"), ("words-2", "markdown"), ("exact", "code")]
    assert notebook.cells[3].source == "and some more."
    assert notebook.cells[4].metadata == {"tags": ["nbval-check-output"]}
    assert notebook.cells[1].metadata == {}
    nbformat.validate(notebook)


def test_code_that_only_draws_is_folded(tmp_path):
    (cell,) = read(source(tmp_path, '# %% id="figure" tags=["hide-input"]\nx = 1\n')).cells
    assert cell.metadata == {"tags": ["hide-input"], "jupyter": {"source_hidden": True}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# %%\nx = 1", "a code cell has no name"),
        ('# %% id="a"\nx = 1\n\n# %% id="a"\ny = 1', "two cells are called 'a'"),
        ('# %% id="a-2"\nx = 1\n\n# %% id="a"\ny = 1\n\n# %% [markdown]\n# words', "two cells are called 'a-2'"),
        ('# %% id="a b"\nx = 1', "'a b' is no name for a cell"),
        ('# %% id=""\nx = 1', "'' is no name for a cell"),
        (f'# %% id="{"a" * 65}"\nx = 1', "at most 64"),
        ('# %% id="a" colour="red"\nx = 1', r"only id and tags are known, not \['colour'\]"),
    ],
)
def test_a_source_that_cannot_become_a_notebook_is_refused(tmp_path, text, said):
    with pytest.raises(BuildError, match=f"04_small.py.*{said}"):
        read(source(tmp_path, text))


def test_a_folder_without_sources_is_refused(tmp_path, capsys):
    with pytest.raises(BuildError, match="no source to build"):
        build.sources(tmp_path)
    assert command.main(["build", str(tmp_path)]) == 1
    source(tmp_path, GOOD)
    assert command.main(["build", str(tmp_path), "05", "06"]) == 1
    assert "begins with 05 or 06" in capsys.readouterr().err


# ---------------------------------------------------------------- outputs that can be kept


def cell(*outputs: dict, tags: tuple[str, ...] = ()) -> nbformat.NotebookNode:
    made = nbformat.v4.new_code_cell("x", id="x", metadata={"tags": list(tags), "execution": {"iopub.execute_input": "2026-01-01"}})
    made.outputs = [nbformat.from_dict(output) for output in outputs]
    return made


def stream(text: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": text}


def data(**kinds: str) -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": {kind.replace("_", "/"): value for kind, value in kinds.items()}}


def test_warnings_and_folders_of_this_machine_are_refused(tmp_path):
    for outputs, said in (
        ([stream("careful", "stderr")], "writes to stderr: 'careful'"),
        ([stream(f"in {Path.home()}/file")], "shows a folder of this machine"),
        ([data(text_markdown=f"in {Path.cwd()}/file")], "shows a folder of this machine"),
        ([stream(f"in {tmp_path}/file")], "shows a folder of this machine"),
    ):
        with pytest.raises(BuildError, match=f"here {said}"):
            build._settle(cell(*outputs), "here", tmp_path)


def test_a_check_that_would_check_nothing_is_refused(tmp_path):
    with pytest.raises(BuildError, match="nbval would check nothing"):
        build._settle(cell(tags=(build.CHECKED,)), "here", tmp_path)
    widget = data(text_plain="words", image_png=base64.b64encode(b"png").decode())
    widget["data"][build.WIDGET_VIEW] = {"model_id": "1"}
    with pytest.raises(BuildError, match="no run gives these outputs"):
        build._settle(cell(widget, tags=(build.CHECKED,)), "here", tmp_path)


def test_clocks_and_other_metadata_are_dropped(tmp_path):
    settled = cell(stream("2\n"), tags=(build.CHECKED,))
    build._settle(settled, "here", tmp_path)
    assert settled.metadata == {"tags": [build.CHECKED]}
    assert settled.outputs == [stream("2\n")]


def test_guesses_of_the_author_do_not_get_into_the_outputs(tmp_path):
    (tmp_path / "predictions.json").write_text("{}")
    with pytest.raises(BuildError, match="holds guesses"):
        build.build(source(tmp_path, GOOD))


def test_a_failing_cell_leaves_no_notebook(tmp_path, capsys):
    source(tmp_path, '# %% id="a"\nprint(1)\n\n# %% id="wrong"\nassert 1 == 2, "no such luck"')
    assert command.main(["build", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "no such luck" in said.err
    assert "encryption" not in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# ---------------------------------------------------------------- built once, looked at often


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """The good source, built by the command as an author types it."""
    folder = tmp_path_factory.mktemp("chapters")
    source(folder, GOOD)
    assert command.main(["build", str(folder)]) == 0
    return folder


@pytest.fixture
def built(once, tmp_path):
    """A copy of what was built, to be spoiled."""
    shutil.copytree(once, tmp_path / "chapters")
    return tmp_path / "chapters" / "source" / "04_small.py"


def outputs(folder: Path) -> dict[str, list]:
    notebook = audits.read(folder / "04_small.ipynb")
    nbformat.validate(notebook)
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def test_what_was_built_agrees_and_carries_the_hash_of_its_source(once):
    file = once / "source" / "04_small.py"
    assert check(file) == []
    assert command.main(["build", "--check", str(once)]) == 0
    notebook = audits.read(target(file))
    assert notebook.metadata.minikv == {"source": "source/04_small.py", "source_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert set(notebook.metadata) == {"kernelspec", "language_info", "minikv"}
    assert sorted(path.name for path in once.iterdir()) == ["04_small.ipynb", "claims.md", "source"]


def test_a_widget_is_kept_as_a_still_picture_with_its_sentence(once):
    picture, sentence = outputs(once)["widget"]
    assert set(picture.data) == {"image/png", "text/plain"}
    assert base64.b64decode(picture.data["image/png"]).startswith(b"\x89PNG")
    assert sentence.data == {"text/markdown": "2 bars"}
    (guess,) = outputs(once)["guess"]
    still = "**Predict.** How many? (When the notebook runs, there is a field for your guess here.)"
    assert guess.data == {"text/markdown": still, "text/plain": still}
    assert "No guess was kept" in outputs(once)["result"][0].data["text/markdown"]
    assert set(outputs(once)["figure"][0].data) == {"image/png", "text/plain"}
    assert outputs(once)["exact"] == [stream("2\n")]


def test_the_page_of_claims_links_to_the_cell(once):
    page = (once / "claims.md").read_text()
    assert "[audit](04_small.ipynb#cell-id=audit)" in page
    assert page.count("to come") == len(audits.CLAIMS) - 1
    assert all(claim.verdict in page for claim in audits.CLAIMS.values())


FAILED = nbformat.v4.new_output("error", ename="KeyError")


def spoil(source: Path, name: str, change) -> None:
    notebook = audits.read(target(source))
    (chosen,) = [cell for cell in notebook.cells if cell.id == name]
    change(chosen)
    nbformat.write(notebook, target(source))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("exact", lambda cell: cell.update(source="print(2)"), "cell exact: differs from cell exact"),
        ("words", lambda cell: cell.update(source="Other words"), "cell words: differs"),
        ("exact", lambda cell: cell.metadata.update(tags=[]), "cell exact: differs"),
        ("exact", lambda cell: cell.update(id="inexact"), "cell inexact: differs from cell exact"),
        ("exact", lambda cell: cell.update(execution_count=None), "cell exact: was not executed"),
        ("exact", lambda cell: cell.update(outputs=[FAILED]), "cell exact: holds an error: KeyError"),
    ],
)  # fmt: skip
def test_a_notebook_that_was_edited_is_found(built, name, change, said, capsys):
    spoil(built, name, change)
    (fault,) = check(built)
    assert said in fault
    assert command.main(["build", "--check", str(target(built).parent)]) == 1
    assert said in capsys.readouterr().err


def test_a_source_that_was_edited_is_found(built):
    built.write_text(GOOD + "\n# %% [markdown]\n# One more.\n")
    assert check(built) == [
        "04_small.ipynb: its outputs are those of an older 04_small.py",
        "04_small.ipynb: 11 cells, but 12 in the source",
    ]


def test_a_notebook_that_was_not_built_is_found(built):
    target(built).unlink()
    assert check(built) == ["04_small.ipynb has not been built from 04_small.py"]


def test_an_engine_that_has_changed_is_found(built, monkeypatch):
    monkeypatch.setattr(build, "source_of", lambda name: "def blocks_for(): ...")
    assert check(built) == ["04_small.ipynb, cell engine: shows an older minikv.cache.blocks:blocks_for"]
    monkeypatch.undo()
    spoil(built, "engine", lambda cell: cell.outputs[0].metadata.minikv.update(source_of="minikv.cache.blocks:gone"))
    assert check(built) == ["04_small.ipynb, cell engine: shows minikv.cache.blocks:gone, which is no more"]


def test_a_page_of_claims_that_is_out_of_date_is_found(built, capsys):
    folder = target(built).parent
    (folder / "claims.md").write_text("Nothing.")
    assert command.main(["build", "--check", str(folder)]) == 1
    assert "claims.md does not say what the notebooks do" in capsys.readouterr().err
    assert command.main(["build", "--check", str(folder), "04"]) == 0, "with a name, only that notebook is looked at"
    audits.write_page(folder)
    assert command.main(["build", "--check", str(folder)]) == 0
