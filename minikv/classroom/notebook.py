"""What the chapters call: a prediction kept and compared, a claim recomputed, the engine's own source, a line with numbers.

Nothing here teaches; it only keeps the notebooks honest. A claim of a source that does not hold raises, so that a
chapter with a wrong number does not build. Source code is shown from the installed package, never pasted.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

from minikv.classroom.claims import CLAIMS
from minikv.show.widgets import explore as explore

PREDICTIONS = Path("predictions.json")
"""Beside the notebook, ignored by git: what the reader guessed. It is read by nobody else."""


def note(text: str) -> None:
    """Show ``text`` (Markdown) as a sentence of the chapter: what a figure shows, with the numbers just computed."""
    from IPython.display import display

    display({"text/markdown": text, "text/plain": text}, raw=True)


def predict(name: str, question: str, unit: str = "") -> None:
    """A field for the reader's guess at a number, kept in ``PREDICTIONS`` under ``name``. Never waits for an answer."""
    import ipywidgets
    from IPython.display import display

    guesses = _guesses()
    field = ipywidgets.Text(
        value=f"{guesses[name]:g}" if name in guesses else "",
        placeholder="a number",
        description=f"Your guess ({unit})" if unit else "Your guess",
        continuous_update=False,
        style={"description_width": "initial"},
    )
    answer = ipywidgets.HTML()

    def kept(change: Any) -> None:
        try:
            keep_guess(name, field.value)
            answer.value = "Kept. The chapter compares it with the result further down."
        except (ValueError, OSError) as wrong:
            answer.value = str(wrong)

    field.observe(kept, names="value")
    box = ipywidgets.VBox([ipywidgets.HTML(f"<b>Predict.</b> {question}"), ipywidgets.HBox([field, answer])])
    still = f"**Predict.** {question} (When the notebook runs, there is a field for your guess here.)"
    display({**box._repr_mimebundle_(), "text/markdown": still, "text/plain": still}, raw=True)


def keep_guess(name: str, text: str) -> float:
    """Keep the number in ``text`` as the guess called ``name``. ValueError when it is none.

    A comma may stand between thousands (1,225) and nowhere else: 0,5 could be meant either way.
    """
    text = text.strip()
    try:
        guess = float(text.replace(",", "") if re.match(r"-?\d{1,3}(,\d{3})+(?![\d,])", text) else text)
    except ValueError:
        guess = math.nan
    if not math.isfinite(guess):
        raise ValueError("A guess is one number, such as 12 or 0.5.")
    PREDICTIONS.write_text(json.dumps({**_guesses(), name: guess}, indent=1) + "\n")
    return guess


def compare(name: str, result: float, unit: str = "") -> None:
    """The guess called ``name`` beside the ``result``; without a guess, the result alone."""
    guess = _guesses().get(name)
    unit = f" {unit}" if unit else ""
    measured = f"**{_number(result)}{unit}**"
    if guess is None:
        note(f"Result: {measured}. (No guess was kept for this question.)")
    else:
        note(f"Your guess: {_number(guess)}{unit}. Result: {measured}.")


def _guesses() -> dict[str, float]:
    try:
        kept = json.loads(PREDICTIONS.read_text())
    except (OSError, ValueError):  # none yet, or damaged: a guess is not worth an error
        return {}
    numbers = kept.items() if isinstance(kept, dict) else ()
    return {name: float(guess) for name, guess in numbers if isinstance(guess, (int, float)) and math.isfinite(guess)}


def claim(name: str, computed: float, source: str | None = None) -> None:
    """Set what a source says beside what has just been ``computed``, with the verdict of ``CLAIMS``.

    ``source`` may name the source for who reads the cell. AssertionError when the computed value is not the one that
    the verdict rests on: the chapter, the engine or the verdict is wrong then. ValueError for an unknown name.
    """
    if name not in CLAIMS:
        raise ValueError(f"no claim is called {name!r}; known are {', '.join(sorted(CLAIMS))}")
    known = CLAIMS[name]
    if source is not None and source != known.source:
        raise ValueError(f"the claim {name!r} is from {known.source}, not from {source}")
    known.check(computed)
    note(
        f"> **Audit.** {known.source_name} says: {known.says}  \n> Computed here: **{known.show(computed)}**.  \n> Verdict: {known.verdict}"
    )


def show_source(thing: Any) -> None:
    """The source of a function, method, class or module of minikv, as it is installed."""
    from IPython.display import display

    name = qualified_name(thing)
    code = source_of(name)
    fence = "````" if "```" in code else "```"
    text = f"From `{name.split(':')[0].replace('.', '/')}.py`:\n\n{fence}python\n{code}\n{fence}"
    display(
        {"text/markdown": text, "text/plain": code},
        raw=True,
        metadata={"minikv": {"source_of": name, "sha256": hashlib.sha256(code.encode()).hexdigest()}},
    )


def qualified_name(thing: Any) -> str:
    """``module:name.in.module`` of something of minikv."""
    if isinstance(thing, property):
        thing = thing.fget
    thing = inspect.unwrap(thing)
    if inspect.ismodule(thing):
        return thing.__name__
    return f"{thing.__module__}:{thing.__qualname__}"


def source_of(name: str) -> str:
    """The source of what ``qualified_name`` called so, without the indentation of a method."""
    from importlib import import_module

    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split(".") if path else ():
        found = inspect.getattr_static(found, part)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    return inspect.cleandoc("\n" + inspect.getsource(found)) if path else inspect.getsource(found).strip()


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
