"""Numbers and names in a sentence: 1 point, 2 points, an int. For the messages that a learner or a teacher reads."""

from __future__ import annotations


def counted(number: float, one: str, many: str = "") -> str:
    """``number`` with its noun: "1 point", "0 points", "1.5 points", "2 entries" when ``many`` says so."""
    return f"{number:g} {one if number == 1 else many or f'{one}s'}"


def an(noun: str) -> str:
    """``noun`` with its article, by its first letter: "an int", "a list"."""
    return f"{'an' if noun[:1].lower() in ('a', 'e', 'i', 'o', 'u') else 'a'} {noun}"
