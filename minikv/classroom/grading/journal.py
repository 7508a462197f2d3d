"""What is graded already, beside the table, so that a grader that is ended loses nothing.

A submission runs as the teacher's user and can kill the grader. Each finished mark is therefore appended to TABLE.partial at once,
and so is who is begun. The same command goes on where the last one stopped. Whose run was never finished is suspected:
suspects come last and alone, and who is in the second unfinished run is not run again. The lines are signed with the
secret, so that a submission that does not know it cannot write a mark of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minikv.classroom.grading.marks import Mark, Override
from minikv.classroom.grading.run import Verdict
from minikv.classroom.grading.submissions import Handed

DEATHS = 2


class Journal:
    """The lines of one table's partial file. ``same`` says what must be the same for them to count: source, limits and so on."""

    def __init__(self, table: Path, secret: bytes, same: str) -> None:
        self.path, self.key = table.with_name(f"{table.name}.partial"), hmac.digest(secret, same.encode(), "sha256")
        self.compared: dict[str, int] | None = None  # what the solution has shown, once it has
        self.marks: dict[str, Mark] = {}
        self.deaths: Counter[str] = Counter()
        self.refused = 0
        self._lock = threading.Lock()
        if self.path.exists():
            self._read()

    def mark(self, handed: Handed) -> Mark | None:
        """The mark of what was handed in, if it was finished."""
        return self.marks.get(_name(handed))

    def unfinished(self, handed: Handed) -> int:
        """How often this was begun and the grader did not live to finish it."""
        return self.deaths[_name(handed)]

    def begin(self, handed: Handed) -> None:
        self._write({"begun": _name(handed)})

    def finish(self, handed: Handed, mark: Mark) -> None:
        self._write({"done": _name(handed), "mark": asdict(mark)})

    def let_go(self, handed: Handed) -> None:
        """It is neither finished nor to blame."""
        self._write({"done": _name(handed)})

    def solved(self, compared: Mapping[str, int]) -> None:
        """The solution got all its points, with so many comparisons in each check."""
        self.compared = dict(compared)
        self._write({"compared": self.compared})

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, what: dict[str, Any]) -> None:
        line = json.dumps(what)
        with self._lock, os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{self._signature(line)} {line}\n")

    def _signature(self, line: str) -> str:
        return hmac.digest(self.key, line.encode(), "sha256").hex()

    def _read(self) -> None:
        for written in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            signature, _, line = written.partition(" ")
            if not hmac.compare_digest(signature.encode(), self._signature(line).encode()):
                self.refused += 1  # of other arguments, cut off in the middle, or not ours
                continue
            what = json.loads(line)
            if "compared" in what:
                self.compared = what["compared"]
                continue
            if "begun" in what:
                self.deaths[what["begun"]] += 1
                continue
            self.deaths.pop(what["done"], None)
            if "mark" in what:
                self.marks[what["done"]] = _mark(what["mark"])


def _name(handed: Handed) -> str:
    return f"{handed.who} {hashlib.sha256(str(handed.path).encode() + handed.content).hexdigest()}"


def _mark(said: dict[str, Any]) -> Mark:
    by_exercise = {field: {int(number): value for number, value in said[field].items()} for field in ("points", "most", "overrides")}
    by_exercise["overrides"] = {number: Override(**override) for number, override in by_exercise["overrides"].items()}
    return Mark(**{**said, **by_exercise, "verdicts": {name: Verdict(**verdict) for name, verdict in said["verdicts"].items()}})
