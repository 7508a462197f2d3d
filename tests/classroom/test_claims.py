"""Every published figure of chapters 1 to 8 is computed again in its chapter, and the page that says where is true."""

from __future__ import annotations

from pathlib import Path

import pytest

import minikv
from minikv.classroom import audits
from minikv.classroom.claims import CLAIMS, SOURCES, Claim

CHAPTERS = Path(minikv.__file__).parent.parent / "chapters"
WRITTEN = range(1, 9)
"""The chapters that are there; claims of later ones are to come."""


@pytest.fixture(scope="module")
def treated() -> dict[str, list[audits.Audit]]:
    found: dict[str, list[audits.Audit]] = {}
    for audit in audits.audits(CHAPTERS):
        found.setdefault(audit.claim, []).append(audit)
    return found


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.chapter in WRITTEN])
def test_the_chapter_of_a_claim_computes_it_and_shows_the_verdict(name, treated):
    cells = [audit for audit in treated.get(name, []) if audit.chapter == CLAIMS[name].chapter]
    assert cells, f"no cell of chapter {CLAIMS[name].chapter} calls claim({name!r}, ...)"
    for audit in cells:
        assert f"Verdict: {CLAIMS[name].verdict}" in audit.shown, f"{audit.notebook.name}, cell {audit.cell} does not show the verdict"


def test_no_chapter_treats_a_claim_that_there_is_not(treated):
    assert set(treated) <= set(CLAIMS)


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_a_claim_is_well_made(name):
    claim = CLAIMS[name]
    assert claim.source in SOURCES
    assert 1 <= claim.chapter <= 14
    assert claim.low <= claim.high
    assert claim.show(claim.low).strip()
    assert claim.says.endswith(".")
    assert claim.verdict.endswith(".")
    assert "|" not in claim.says + claim.verdict


def test_the_page_says_what_the_chapters_do():
    assert audits.check_page(CHAPTERS) == []
    page = (CHAPTERS / audits.PAGE).read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and not line.startswith("| chapter")]
    assert len(rows) == len(CLAIMS)
    for chapter, who, _, _, where in rows:
        assert who in {source.lower() for source in SOURCES.values()}
        assert (where == "to come") == (int(chapter) not in WRITTEN)


def test_only_the_notebook_of_the_chapter_counts(tmp_path, monkeypatch):
    """An audit in another chapter, in a comment or with a computed name is none."""
    import nbformat

    monkeypatch.setattr(audits, "CLAIMS", {"a": Claim(3, "talk", "x.", 1, 1, str, "right.")})
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell('claim("a", 1)\nclaim(name, 2)', id="here"),
        nbformat.v4.new_code_cell('# claim("b", 1)', id="there"),
    ]
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", data={"text/markdown": "Verdict: right."})]
    for name in ("03_right.ipynb", "04_wrong.ipynb", "appendix_x.ipynb"):
        nbformat.write(notebook, tmp_path / name)
    assert [(audit.claim, audit.chapter, audit.cell, audit.shown) for audit in audits.audits(tmp_path)] == [
        ("a", chapter, "here", "Verdict: right.") for chapter in (3, 4, None)
    ]
    assert audits.page(tmp_path).splitlines()[-1] == "| 3 | the talk | x. | right. | [here](03_right.ipynb#cell-id=here) |"
