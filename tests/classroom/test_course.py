"""The chapters as they are stored: built from their sources, with pictures, answers, links that lead somewhere, and no litter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import minikv
from minikv.classroom import __main__ as command
from minikv.classroom import audits, build

CHAPTERS = Path(minikv.__file__).parent.parent / "chapters"
NAMES = (
    "00_start_here", "01_one_token_at_a_time", "02_remember_the_keys", "03_what_a_token_weighs", "04_the_car_park", "05_pages",
    "06_share_the_prefix", "07_many_at_once", "08_the_cliff", "appendix_transformer",
)  # fmt: skip
TAUGHT = NAMES[1:9]
"""Those that follow the loop of a chapter."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s]+(?:\([^()\s]*\))?)[^()]*\)")
WIDEST = 110
"""Characters of plain text beside the code of a page on a laptop."""


@pytest.fixture(scope="module")
def course() -> dict[str, object]:
    return {name: audits.read(CHAPTERS / f"{name}.ipynb") for name in NAMES if (CHAPTERS / f"{name}.ipynb").exists()}


@pytest.fixture
def chapter(request, course):
    if request.param not in course:
        pytest.fail(f"{request.param}.ipynb has not been built")
    return course[request.param]


every_chapter = pytest.mark.parametrize("chapter", NAMES, indirect=True)
every_taught_chapter = pytest.mark.parametrize("chapter", TAUGHT, indirect=True)


def code(chapter) -> list:
    return [cell for cell in chapter.cells if cell.cell_type == "code"]


def prose(chapter) -> str:
    return "\n\n".join(cell.source for cell in chapter.cells if cell.cell_type == "markdown")


def shown_markdown(chapter) -> str:
    """What the outputs say as Markdown."""
    return "\n\n".join(output.data.get("text/markdown", "") for cell in code(chapter) for output in cell.outputs if "data" in output)


def links(text: str) -> list[tuple[str, str, str]]:
    """Of each link or image: "!" or nothing, its words, its address. What stands in code is none."""
    return LINK.findall(re.sub(r"(`+).+?\1", "", text, flags=re.DOTALL))


def calls(chapter, function: str) -> list:
    return [cell for cell in code(chapter) for _ in audits.calls(cell.source, function)]


def pictures(cells) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


# ---------------------------------------------------------------- built


def test_notebooks_sources_engine_and_claims_agree(capsys):
    assert command.main(["build", "--check", str(CHAPTERS)]) == 0, capsys.readouterr().err


def test_the_folder_holds_the_chapters_and_nothing_else():
    assert {path.stem for path in audits.notebooks(CHAPTERS)} == {source.stem for source in build.sources(CHAPTERS)} == set(NAMES)
    assert {path.name for path in CHAPTERS.iterdir() if not path.name.startswith((".", "predictions"))} == {
        *(f"{name}.ipynb" for name in NAMES), "source", "glossary.md", audits.PAGE,
    }  # fmt: skip


# ---------------------------------------------------------------- the loop of a chapter


@every_taught_chapter
def test_there_are_figures_predictions_and_folded_answers(chapter):
    assert pictures(code(chapter)) >= 2
    assert len(calls(chapter, "predict")) <= 2
    text = prose(chapter)
    assert 4 <= text.count("<details>") <= 6
    assert text.count("<details>") == text.count("</details>") == text.count("</summary>\n\n") == text.count("\n\n</details>")
    assert calls(chapter, "show_source")


@every_chapter
def test_the_widget_is_there_once_and_its_picture_is_stored(chapter):
    number = chapter.metadata.minikv.source.removeprefix("source/")[:2]
    cells = calls(chapter, "explore")
    if number not in {"02", "03", "04", "05", "06", "07", "08"}:
        assert cells == []
        return
    (cell,) = cells
    assert pictures([cell]) == 1
    sentences = [output.data["text/markdown"] for output in cell.outputs if "text/markdown" in output.get("data", {})]
    assert len(sentences) == 1
    assert re.search(r"\d", sentences[0]), "the sentence has the numbers"


@every_chapter
def test_predictions_are_compared_further_down(chapter):
    asked, answered = (
        {call.args[0].value: place for place, cell in enumerate(code(chapter)) for call in audits.calls(cell.source, function)}
        for function in ("predict", "compare")
    )
    assert asked.keys() == answered.keys()
    assert all(asked[name] < answered[name] for name in asked)


# ---------------------------------------------------------------- as a page


@every_chapter
def test_no_output_is_wider_than_the_page_or_full_of_progress(chapter):
    for cell in code(chapter):
        for output in cell.outputs:
            plain = output.text if output.output_type == "stream" else "" if len(output.data) > 1 else output.data.get("text/plain", "")
            assert "\r" not in plain, f"cell {cell.id} keeps a progress bar"
            assert "\x1b" not in plain, f"cell {cell.id} keeps colours of a terminal"
            widest = max(map(len, plain.splitlines()), default=0)
            assert widest <= WIDEST, f"cell {cell.id} prints a line of {widest} characters"
            assert len(plain.splitlines()) <= 60, f"cell {cell.id} prints {len(plain.splitlines())} lines"


@every_chapter
def test_every_picture_in_the_text_has_a_description(chapter):
    for image, words, address in links(prose(chapter) + shown_markdown(chapter)):
        assert not image or len(words) >= 20, f"{address} has no description"
    for tag in re.findall(r"<img [^>]*>", prose(chapter)):
        assert re.search(r'alt="[^"]{20,}"', tag), tag


@every_chapter
def test_links_lead_somewhere(chapter):
    """In the clone and in a learner's working copy: to files that ``learn`` copies as well."""
    for _, words, address in links(prose(chapter) + shown_markdown(chapter)):
        file, _, anchor = address.partition("#")
        if address.startswith(("https://", "http://")):
            continue
        assert "/" not in file, f"[{words}]({address}) leads out of the folder, and nowhere from a working copy"
        assert not file or (CHAPTERS / file).exists(), f"[{words}]({address}): there is no such file"
        if anchor and file == "glossary.md":
            assert anchor in anchors(CHAPTERS / file), f"[{words}]({address}): the glossary has no such entry"


def test_the_other_pages_lead_somewhere_too(course):
    for page in sorted(CHAPTERS.glob("*.md")):
        for _, words, address in links(page.read_text(encoding="utf-8")):
            if address.startswith(("https://", "http://")):
                continue
            file, _, anchor = address.partition("#")
            assert (CHAPTERS / (file or page.name)).exists(), f"{page.name}: [{words}]({address})"
            if anchor.startswith("cell-id="):
                assert anchor.removeprefix("cell-id=") in {cell.id for cell in course[Path(file).stem].cells}
            elif anchor and file in ("", page.name):
                assert anchor in anchors(page), f"{page.name}: [{words}]({address})"


def anchors(page: Path) -> set[str]:
    """What can be linked to: explicit anchors, and headings as GitHub and JupyterLab name them."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"""<a (?:id|name)=["']([^"']+)["']""", text))
    headings = {heading.strip() for heading in re.findall(r"(?m)^#+ (.+)$", text)}
    return named | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
