"""Controls that move one picture: the picture follows, an error does not lose it, and nothing is left open."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from minikv.show.widgets import WIDGET_VIEW, Choice, Explorer, Picture, Slider, Text, explore, png

CONTROLS = {"count": Slider("How many", [1, 2, 3], 2), "colour": Choice("Shade", ["black", "grey"], "grey"), "word": Text("Word", "a")}


def draw(count: int, colour: str, word: str) -> Picture:
    if not word:
        raise ValueError("a word has <at least> one letter")
    figure = Figure(figsize=(2, 1))
    figure.subplots().bar(range(count), range(1, count + 1), color=colour)
    return Picture(figure, f'{count} bars, {colour}, for "{word}"')


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words += data


def shown(explorer: Explorer) -> tuple[dict, str]:
    """The attributes of the one image, and the sentence."""
    page = Tags(explorer.view.value)
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [tag for tag, _ in page.tags] == ["img", "p"]
    return image, page.words


def test_three_changes_leave_one_picture_that_is_each_time_another():
    explorer = Explorer(draw, CONTROLS)
    seen = [shown(explorer)]
    for name, value in (("count", 3), ("colour", "black"), ("word", "b")):
        explorer.fields[name].value = value
        seen.append(shown(explorer))
    assert [image["alt"] for image, _ in seen] == [words for _, words in seen]
    assert [words for _, words in seen] == [
        '2 bars, grey, for "a"', '3 bars, grey, for "a"', '3 bars, black, for "a"', '3 bars, black, for "b"',
    ]  # fmt: skip
    pictures = [image["src"] for image, _ in seen]
    assert len(set(pictures)) == 3, "the first three differ; the word changes no bar"
    assert all(base64.b64decode(picture.split(",")[1]).startswith(b"\x89PNG") for picture in pictures)
    assert explorer.values == {"count": 3, "colour": "black", "word": "b"}
    assert len(explorer.box.children) == 2
    assert plt.get_fignums() == []


def test_values_that_do_not_go_together_are_said_below_the_last_picture():
    explorer = Explorer(draw, CONTROLS)
    before, _ = shown(explorer)
    explorer.fields["word"].value = ""
    after, words = shown(explorer)
    assert after == before
    assert words == "These values do not go together: a word has <at least> one letter"
    explorer.fields["word"].value = "c"
    assert shown(explorer)[1].endswith('for "c"')


def test_what_a_reader_types_is_no_html():
    explorer = Explorer(draw, CONTROLS)
    explorer.fields["word"].value = '"><img src=x onerror="alert(1)">'
    image, words = shown(explorer)
    assert image["alt"] == words == '2 bars, grey, for ""><img src=x onerror="alert(1)">"'
    assert "<img src=x" not in explorer.view.value


@pytest.mark.parametrize(("name", "control"), [("count", Slider("n", [1, 2], 3)), ("colour", Choice("c", ["black"], "red"))])
def test_a_start_that_is_not_among_the_values_is_refused(name, control):
    with pytest.raises(ValueError, match=rf"{name} cannot start at {re.escape(repr(control.start))}"):
        Explorer(draw, {**CONTROLS, name: control})


def test_start_values_that_do_not_go_together_are_an_error_of_the_chapter():
    with pytest.raises(ValueError, match="at least"):
        Explorer(draw, {**CONTROLS, "word": Text("Word", "")})


def test_every_control_answers_to_the_keyboard_once_it_is_left():
    """A slider that redrew while it is dragged would queue a hundred pictures; a text that redrew at each letter as well."""
    fields = Explorer(draw, CONTROLS).fields
    assert [field.continuous_update for field in fields.values()] == [False, False, False]
    assert "Dropdown" not in {type(field).__name__ for field in fields.values()}, "JupyterLab takes its arrow keys away"
    assert [field.description for field in fields.values()] == ["How many", "Shade", "Word"]


def test_explore_shows_the_widget_with_a_still_picture_and_its_words(displayed):
    explore(draw, **CONTROLS)
    (output,) = displayed
    assert set(output.data) == {WIDGET_VIEW, "image/png", "text/plain"}
    assert output.data["text/plain"] == '2 bars, grey, for "a"'
    assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_a_pyplot_figure_is_closed_once_it_is_drawn():
    figure, axes = plt.subplots()
    axes.plot([1, 2])
    assert png(figure).startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert png(figure) == png(figure), "and may be drawn again"


def test_the_style_of_the_chapters_needs_no_colour():
    """Lines of different place in the cycle differ by dash and marker as well."""
    with plt.style.context("minikv.show.course"):
        cycle = plt.rcParams["axes.prop_cycle"].by_key()
    assert len(set(cycle["linestyle"])) == len(set(cycle["marker"])) == len(cycle["color"])
    for colour in cycle["color"]:
        assert colour[1:3] == colour[3:5] == colour[5:7], f"{colour} is no grey"
