"""A peer in a process of its own, stopped while it is not its turn.

The process runs one of the scripts beside this file and answers one question at a time, a line of JSON each way (see
``lines.py``). Between two questions its whole process group is stopped: threads that wait by spinning, as those of
OpenMP do for a while, would take a core away from whoever is measured meanwhile. A peer that does not answer in time is
ended; what it did not answer is named, and the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from minikv.lab.peers.environments import PeerError, last_words

OPEN_S = 900.0  # vLLM compiles for one minute on a quiet machine
ANSWER_S = 600.0
FAREWELL_S = 5.0


class PeerProcess:
    """``script`` in ``python``, opened with ``settings``. PeerError when it does not come up within ``open_s`` seconds.

    ``threads`` is how many threads it may compute with.
    """

    def __init__(
        self, python: str, script: str | Path, threads: int, settings: dict[str, Any], open_s: float = OPEN_S, answer_s: float = ANSWER_S
    ) -> None:
        self._answer_s = answer_s
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed in close()
        # A group of its own can be stopped as one. It stays in our session: if we are killed, the system wakes and ends a stopped one.
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8",
            env=_environment(threads), process_group=0,
        )  # fmt: skip
        self._answers: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.about = self._ask({"do": "open", "threads": threads, **settings}, open_s)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        """What the peer answers. PeerError when it fails, ends or takes too long; in the last two cases it is gone."""
        return self._ask({"do": do, **words}, self._answer_s)

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdin.closed:
            raise PeerError("it has ended")
        self._signal("SIGCONT")
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except Empty:
            self.close(at_once=True)
            raise PeerError(f"no answer to {message['do']!r} within {timeout_s:g} s") from None
        except OSError:
            line = ""
        if not line:
            raise PeerError(f"ended without an answer: {self._last_words()}")
        self._signal("SIGSTOP")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put("")  # it has ended

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        text = last_words(self._errors.read())
        self.close()
        return f"{text} (exit status {status})"

    def _signal(self, name: str) -> None:
        """Send a signal to the peer's group, where there is such a thing."""
        if hasattr(signal, name) and hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, getattr(signal, name))

    def close(self, at_once: bool = False) -> None:
        """End the process and all that it started; more than once does no harm."""
        if self._errors.closed:
            return
        assert self._process.stdin is not None
        self._signal("SIGCONT")
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # an idle peer ends when its input does
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if at_once else FAREWELL_S)
        self._signal("SIGKILL")
        self._process.kill()
        self._process.wait()
        self._errors.close()


def _environment(threads: int) -> dict[str, str]:
    """Ours without what leads to our packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"OMP_NUM_THREADS": str(threads)}


def close_all(peers: Iterable[PeerProcess]) -> None:
    """End all of ``peers``, whatever state they are in."""
    for peer in peers:
        peer.close()
