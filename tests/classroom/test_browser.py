"""The widgets in a real browser: JupyterLab as ``python -m minikv learn`` starts it, and a headless Chromium before it.

What is tested is what no test of the functions behind the widgets can see: that a control has the keyboard, that the picture
changes when it moves, and that there is one picture afterwards and not a pile of them.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

import minikv
from minikv.classroom import audits
from minikv.classroom.build import KERNEL

pytestmark = pytest.mark.browser

CHAPTERS = Path(minikv.__file__).parent.parent / "chapters"
WITH_A_WIDGET = (
    "02_remember_the_keys", "03_what_a_token_weighs", "04_the_car_park", "05_pages", "06_share_the_prefix", "07_many_at_once",
    "08_the_cliff",
)  # fmt: skip
WHOLE = "02_remember_the_keys"
"""The chapter that is run from top to bottom; of the others only what the widget needs."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_MS = 60_000
SMALL = """\
from matplotlib.figure import Figure
from minikv.classroom.notebook import explore, predict
from minikv.show.widgets import Choice, Picture, Slider, Text

def draw(count, shade, word):
    if not word:
        raise ValueError("a word has at least one letter")
    figure = Figure(figsize=(3, 1.5))
    axes = figure.subplots()
    axes.bar(range(count), range(1, count + 1), color=shade)
    axes.set_title(word)
    return Picture(figure, f"{count} bars, {shade}, under <{word}>")

controls = {"count": Slider("Bars", [1, 2, 3, 4, 5], 2), "shade": Choice("Shade", ["black", "grey"], "grey"), "word": Text("Word", "abc")}
explore(draw, **controls)
"""


def excerpt(chapter: Path) -> str:
    """The imports of a chapter and the cell with its widget. The widget needs nothing else: its data come from its module."""
    cells = [cell.source for cell in audits.read(chapter).cells if cell.cell_type == "code"]
    (widget,) = [code for code in cells if audits.calls(code, "explore")]
    imports = [ast.unparse(node) for code in cells for node in ast.parse(code).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n".join([*imports, widget])


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """JupyterLab on a learner's working copy, with two notebooks of ours in it, and settings that are nobody's."""
    missing = [] if CHROMIUM else ["Chromium (on Debian: apt-get install chromium)"]
    missing += [] if importlib.util.find_spec("playwright") else ["playwright (pip install -e '.[test]')"]
    if missing:
        said = f"the widgets were not tried in a browser: {' and '.join(missing)} is not there"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(said)
    home = tmp_path_factory.mktemp("learner")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    environment |= {f"JUPYTERLAB_{kind}_DIR": str(home / kind.lower()) for kind in ("SETTINGS", "WORKSPACES")}
    environment |= {"IPYTHONDIR": str(home / "ipython"), "JUPYTER_TOKEN": "a-token", "JUPYTER_PORT": str(port)}
    log = home / "log"
    with log.open("w") as opened:
        learning = subprocess.Popen(
            [sys.executable, "-m", "minikv", "learn", "--no-browser"],
            cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=opened, stderr=opened,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/lab", log.read_text())):
            assert learning.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        course = home / "course"
        notebook = nbformat.v4.new_notebook(metadata=KERNEL, cells=[nbformat.v4.new_code_cell(SMALL, id="small")])
        nbformat.write(notebook, course / "small.ipynb")
        widgets = [name for name in WITH_A_WIDGET if (CHAPTERS / f"{name}.ipynb").exists()]
        goes_on = {"tags": ["raises-exception"]}  # a chapter whose widget fails shall not stop the others'
        notebook.cells = [nbformat.v4.new_code_cell(excerpt(CHAPTERS / f"{name}.ipynb"), id=name[:2], metadata=goes_on) for name in widgets]
        nbformat.write(notebook, course / "widgets.ipynb")
        yield SimpleNamespace(address=found[0], widgets=widgets)
    finally:
        learning.terminate()
        learning.wait(timeout=60)


@pytest.fixture(scope="module")
def chromium(lab) -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_and_run(lab, chromium):
    """Open a notebook as a learner does, run all of it from the menu, and wait until the last cell is done."""
    foreign: list[str] = []

    def opened(name: str):
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        page.on(
            "request",
            lambda request: (
                foreign.append(request.url) if not re.match(r"(https?|wss?)://127\.0\.0\.1:|data:|blob:", request.url) else None
            ),
        )
        page.goto(f"{lab.address}/tree/{name}.ipynb?reset&token=a-token")
        page.locator("#jp-main-statusbar").get_by_text(re.compile(r"\| Idle")).wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_function(
            """() => {
                const shown = [...document.querySelectorAll('.jp-CodeCell')].filter(each => !each.querySelector('.jp-InputPlaceholder'));
                const prompts = shown.map(each => each.querySelector('.jp-InputPrompt').textContent);  // a folded cell has no number
                return prompts.length && prompts.every(each => /\\d/.test(each));
            }"""
        )
        return page

    yield opened
    assert foreign == [], "nothing outside this machine was asked for"


class Widget:
    """The output of one ``explore`` on a page."""

    def __init__(self, page, cell=None) -> None:
        self.page = page
        self.output = (cell or page).locator(".jp-OutputArea-output").filter(has=page.locator(".widget-html img"))
        self.image = self.output.locator("img")
        self.image.scroll_into_view_if_needed()

    def seen(self) -> tuple[str, str, str]:
        """What the one picture is, what it says to who cannot see it, and the sentence below."""
        assert self.image.count() == 1
        return self.image.get_attribute("src"), self.image.get_attribute("alt"), self.output.get_by_role("status").inner_text()

    def after(self, key: str) -> tuple[str, str, str]:
        """The same once ``key`` was pressed and something has changed."""
        before = self.seen()
        self.page.keyboard.press(key)
        deadline = time.monotonic() + 15
        while self.seen()[1:] == before[1:]:
            assert time.monotonic() < deadline, f"{key} changes nothing"
            time.sleep(0.05)
        return self.seen()

    def tab_to(self, selector: str) -> None:
        """Reach the next control of a kind with Tab alone."""
        for _ in range(3):
            self.page.keyboard.press("Tab")
            if self.page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"three times Tab does not lead to {selector}")


def test_slider_choice_and_text_are_moved_by_keyboard_and_leave_one_figure(open_and_run):
    widget = Widget(open_and_run("small"))
    start = widget.seen()
    assert start[1] == start[2] == "2 bars, grey, under <abc>"
    assert start[0].startswith("data:image/png;base64,")
    widget.output.get_by_role("slider").first.focus()
    three, four = widget.after("ArrowRight"), widget.after("ArrowRight")
    back = widget.after("ArrowLeft")
    assert [seen[1] for seen in (three, four, back)] == [f"{count} bars, grey, under <abc>" for count in (3, 4, 3)]
    assert len({start[0], three[0], four[0]}) == 3
    assert back == three
    widget.tab_to("[role=slider]")
    assert widget.after("ArrowLeft")[1] == "3 bars, black, under <abc>"
    widget.tab_to("input")
    widget.page.keyboard.press("Control+A")
    widget.page.keyboard.type("<b>x")
    typed = widget.after("Enter")
    assert typed[1] == typed[2] == "3 bars, black, under <<b>x>"
    widget.page.keyboard.press("Control+A")
    widget.page.keyboard.press("Delete")
    refused = widget.after("Enter")
    assert refused[:2] == typed[:2], "values that do not go together leave the picture"
    assert "a word has at least one letter" in refused[2]
    assert widget.image.count() == 1
    assert widget.output.page.locator(".jp-OutputArea-output img").count() == 1


@pytest.fixture(scope="module")
def widgets(open_and_run):
    return open_and_run("widgets")


def moved(widget: Widget) -> None:
    """Three changes by keyboard on the first slider: the picture changes, comes back, and is the only one."""
    start = widget.seen()
    slider = widget.output.get_by_role("slider").first
    slider.focus()
    at_the_end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
    there, back = ("ArrowLeft", "ArrowRight") if at_the_end else ("ArrowRight", "ArrowLeft")
    first = widget.after(there)
    assert first[0] != start[0]
    assert first[1] != start[1]
    assert widget.after(back) == start
    assert widget.after(there) == first
    assert widget.output.locator("img").count() == 1


@pytest.mark.parametrize("name", WITH_A_WIDGET)
def test_the_widget_of_a_chapter_moves(name, lab, widgets):
    assert name in lab.widgets, f"{name}.ipynb has not been built"
    cell = widgets.locator(".jp-CodeCell").nth(lab.widgets.index(name))
    assert cell.locator("[data-mime-type='application/vnd.jupyter.stderr'], .jp-RenderedText[data-mime-type*=error]").count() == 0, (
        cell.inner_text()
    )
    moved(Widget(widgets, cell))


def test_a_whole_chapter_runs_and_its_widget_moves(open_and_run):
    page = open_and_run(WHOLE)
    assert page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    moved(Widget(page))
