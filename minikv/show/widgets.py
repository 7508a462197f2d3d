"""A picture with a few controls beside it.

``explore`` takes a plain function from the controls' values to a ``Picture``: a figure and the sentence that says what to
see in it. In a running notebook the controls can be moved (with the keyboard too) and the one figure is drawn anew. In a
notebook that is only read, the figure for the starting values stands in its place, with the sentence below.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure, and in words what there is to see, with the numbers. ``summary`` serves who cannot see it."""

    figure: Any
    summary: str


@dataclass(frozen=True)
class Slider:
    """One of ``values``, in order, chosen by dragging or with the arrow keys. ``start`` is the value shown first."""

    label: str
    values: Sequence[Any]
    start: Any


@dataclass(frozen=True)
class Choice:
    """One of ``options``, by name; a slider as well, because JupyterLab takes the arrow keys away from a drop-down list."""

    label: str
    options: Sequence[str]
    start: str


@dataclass(frozen=True)
class Text:
    """A line that the reader types; the picture follows when Enter is pressed or the field is left."""

    label: str
    start: str


Control = Slider | Choice | Text


def explore(draw: Callable[..., Picture], **controls: Control) -> None:
    """Show ``draw(**values)`` with a control for each of its arguments, and draw it anew whenever one changes.

    A ValueError of ``draw`` (values that make no sense together) is shown below the picture, which stays as it was.
    """
    from IPython.display import display

    explorer = Explorer(draw, controls)
    first = explorer.picture
    still = {"image/png": base64.b64encode(png(first.figure)).decode(), "text/plain": first.summary}
    display({**explorer.box._repr_mimebundle_(), **still}, raw=True)


class Explorer:
    """The controls and the one picture that they move. ``box`` is the widget to display."""

    def __init__(self, draw: Callable[..., Picture], controls: Mapping[str, Control]) -> None:
        import ipywidgets

        for name, control in controls.items():
            possible = control.values if isinstance(control, Slider) else control.options if isinstance(control, Choice) else None
            if possible is not None and control.start not in possible:
                raise ValueError(f"{name} cannot start at {control.start!r}; it can be one of {list(possible)}")
        self._draw = draw
        self.fields = {name: _field(control) for name, control in controls.items()}
        self.view = ipywidgets.HTML()
        self.picture = draw(**self.values)
        self._show(self.picture.summary)
        for field in self.fields.values():
            field.observe(self._changed, names="value")
        row = ipywidgets.HBox(list(self.fields.values()), layout=ipywidgets.Layout(flex_flow="row wrap"))
        self.box = ipywidgets.VBox([row, self.view])

    @property
    def values(self) -> dict[str, Any]:
        return {name: field.value for name, field in self.fields.items()}

    def _changed(self, change: Any) -> None:
        try:
            self.picture = self._draw(**self.values)
        except ValueError as wrong:
            self._show(f"These values do not go together: {wrong}")
        else:
            self._show(self.picture.summary)

    def _show(self, words: str) -> None:
        picture = base64.b64encode(png(self.picture.figure)).decode()
        alternative = html.escape(self.picture.summary, quote=True)
        self.view.value = (
            f'<img alt="{alternative}" src="data:image/png;base64,{picture}" style="max-width:100%">'
            f'<p role="status" aria-live="polite" style="white-space:pre-line">{html.escape(words)}</p>'
        )


def _field(control: Control) -> Any:
    import ipywidgets

    common: dict[str, Any] = {
        "description": control.label,
        "style": {"description_width": "initial"},
        "layout": ipywidgets.Layout(width="auto", min_width="20em", margin="0 1.5em 0 0"),
    }
    if isinstance(control, Text):
        return ipywidgets.Text(value=control.start, continuous_update=False, **common)
    possible = control.values if isinstance(control, Slider) else control.options
    return ipywidgets.SelectionSlider(options=list(possible), value=control.start, continuous_update=False, **common)


def png(figure: Any, dpi: int = 100) -> bytes:
    """``figure`` as a PNG file in memory, and the figure closed, so that no notebook shows it a second time."""
    import matplotlib.pyplot

    matplotlib.pyplot.close(figure)
    if figure.canvas is None or not hasattr(figure.canvas, "print_png"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()
