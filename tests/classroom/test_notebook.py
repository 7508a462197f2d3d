"""What the chapters call: predictions, claims, the engine's source, and sentences with numbers."""

from __future__ import annotations

import functools
import inspect

import pytest

from minikv.cache import blocks
from minikv.classroom import claims, notebook
from minikv.classroom.claims import CLAIMS
from minikv.show.widgets import WIDGET_VIEW


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def words(displayed):
    """What one call shows, as Markdown."""

    def words_of(function, *arguments, **options) -> str:
        function(*arguments, **options)
        output = displayed.pop()
        assert displayed == []
        return output.data["text/markdown"]

    return words_of


# ---------------------------------------------------------------- predictions


def test_a_guess_is_kept_and_set_beside_the_result(tmp_path, words):
    assert words(notebook.compare, "a", 1225, "tokens") == "Result: **1,225 tokens**. (No guess was kept for this question.)"
    assert notebook.keep_guess("a", " 1,000 ") == 1000
    assert notebook.keep_guess("b", "-0.5") == -0.5
    assert words(notebook.compare, "a", 1225, "tokens") == "Your guess: 1,000 tokens. Result: **1,225 tokens**."
    assert words(notebook.compare, "b", 2.345) == "Your guess: -0.5. Result: **2.35**."
    notebook.keep_guess("a", "2e3")
    assert "2,000 tokens" in words(notebook.compare, "a", 1225, "tokens")
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.json"]


@pytest.mark.parametrize("text", ["", "ten", "nan", "inf", "1,2", "0,5", "1,22,5", "1 2", "10 %"])
def test_what_is_no_number_is_not_kept(text, tmp_path):
    with pytest.raises(ValueError, match="one number"):
        notebook.keep_guess("a", text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "x"}', '{"a": NaN}', '{"a": null}', "\x00"])
def test_a_damaged_file_of_guesses_is_no_guess(content, words, displayed):
    notebook.PREDICTIONS.write_text(content)
    assert "No guess" in words(notebook.compare, "a", 3)
    notebook.predict("a", "How many?")
    assert displayed.pop().data["text/plain"].startswith("**Predict.** How many?")
    notebook.keep_guess("a", "4")
    assert words(notebook.compare, "a", 3) == "Your guess: 4. Result: **3**."


def test_the_field_keeps_what_is_typed_and_says_what_is_wrong(monkeypatch, displayed):
    import ipywidgets

    made = []
    monkeypatch.setattr(ipywidgets, "Text", lambda text=ipywidgets.Text, **options: made.append(text(**options)) or made[-1])
    notebook.predict("a", "How many?", "tokens")
    (output,) = displayed
    assert WIDGET_VIEW in output.data
    assert output.data["text/plain"].startswith("**Predict.** How many?")
    (field,) = made
    assert (field.value, field.description, field.continuous_update) == ("", "Your guess (tokens)", False)
    field.value = "12"
    assert notebook._guesses() == {"a": 12.0}
    field.value = "twelve"
    assert notebook._guesses() == {"a": 12.0}
    notebook.predict("a", "How many?")
    assert made[1].value == "12"


@pytest.mark.parametrize(
    ("value", "written"),
    [(3, "3"), (1225.0, "1,225"), (0.12345, "0.123"), (999.7, "1,000"), (12345.6, "12,346"), (-2.5, "-2.5"), (float("inf"), "inf")],
)
def test_numbers_are_written_as_people_do(value, written):
    assert notebook._number(value) == written


# ---------------------------------------------------------------- claims


def test_a_claim_stands_beside_what_was_computed(words):
    text = words(notebook.claim, "924-of-1024", 924, source="blog")
    assert "The blog says: 924 of 1,024" in text
    assert "**924 slots**" in text
    assert text.endswith(f"Verdict: {CLAIMS['924-of-1024'].verdict}")


@pytest.mark.parametrize("computed", [923, 925, 924.5, float("nan")])
def test_a_claim_that_does_not_come_out_stops_the_chapter(computed):
    with pytest.raises(AssertionError, match=r"the verdict rests on 924, but (92|nan)"):
        notebook.claim("924-of-1024", computed)


def test_a_band_is_said_with_both_ends(monkeypatch, words):
    monkeypatch.setitem(claims.CLAIMS, "band", claims.Claim(1, "talk", "x.", 1, 2, str, "so it is."))
    with pytest.raises(AssertionError, match="rests on 1 to 2, but 3 was computed"):
        notebook.claim("band", 3)
    assert "so it is." in words(notebook.claim, "band", 2)


def test_an_unknown_claim_and_a_wrong_source_are_named():
    with pytest.raises(ValueError, match=r"no claim is called 'x'; known are .*924-of-1024"):
        notebook.claim("x", 1)
    with pytest.raises(ValueError, match="is from blog, not from talk"):
        notebook.claim("924-of-1024", 924, source="talk")


# ---------------------------------------------------------------- source and sentences


@functools.lru_cache
def wrapped(number: int) -> int:
    """A function behind a decorator."""
    return number + 1


class Shown:
    @staticmethod
    def still(number: int) -> int:
        return number

    @classmethod
    def made(cls) -> Shown:
        return cls()

    @property
    def size(self) -> int:
        """In blocks.

        ```
        a fence in a docstring
        ```
        """
        return 1

    def method(self) -> str:
        if self:
            return "indented"
        return ""


@pytest.mark.parametrize("thing", [blocks.blocks_for, blocks.BlockPool, blocks.BlockPool.check_integrity, blocks])
def test_the_engine_is_shown_as_it_is_installed(thing, displayed):
    notebook.show_source(thing)
    (output,) = displayed
    code = output.data["text/plain"]
    lines = [line.strip() for line in inspect.getsource(thing).strip().splitlines()]
    assert [line.strip() for line in code.splitlines()] == lines
    assert output.data["text/markdown"] == f"From `minikv/cache/blocks.py`:\n\n```python\n{code}\n```"
    assert output.metadata["minikv"]["source_of"] == notebook.qualified_name(thing)
    assert code == notebook.source_of(notebook.qualified_name(thing))


@pytest.mark.parametrize(
    ("thing", "first", "last"),
    [
        (Shown.still, "@staticmethod", "    return number"),
        (Shown.made, "@classmethod", "    return cls()"),
        (Shown.size, "@property", "    return 1"),
        (Shown.method, "def method(self) -> str:", '    return ""'),
        (wrapped, "@functools.lru_cache", "    return number + 1"),
    ],
)
def test_whatever_can_be_shown_loses_its_indentation(thing, first, last, displayed):
    notebook.show_source(thing)
    (output,) = displayed
    lines = output.data["text/plain"].splitlines()
    assert (lines[0], lines[-1]) == (first, last)
    assert output.data["text/markdown"].count("````") == (2 if thing is Shown.size else 0)


def test_a_note_is_markdown_with_plain_words_behind_it(displayed):
    notebook.note("**3** blocks")
    (output,) = displayed
    assert output.data == {"text/markdown": "**3** blocks", "text/plain": "**3** blocks"}
