"""A peer that needs nothing installed: a real script in a real process, which answers by a rule and misbehaves on demand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import minikv

PEERS_FOLDER = Path(minikv.__file__).parent / "lab" / "peers"
SCRIPT = f"""
import os, subprocess, sys, threading, time
sys.path.insert(0, {str(PEERS_FOLDER)!r})
import conversations
from lines import serve

class Fake:
    alone, together = ("fake",), ("fake", "fake, one by one")

    def __init__(self, folder, threads, mode="good", **settings):
        print("a library that greets on standard output", flush=True)
        os.write(1, b"and one that does it in C\\n")
        if mode == "absent":
            import no_such_package_anywhere
        self.mode = mode
        seen = (os.environ["OMP_NUM_THREADS"], "PYTHONPATH" in os.environ, sorted(settings))
        self.version = f"fake 1.0, {{threads}} threads, {{seen}}"
        if mode == "busy":
            threading.Thread(target=self.spin, daemon=True).start()
            self.child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            self.version = str(self.child.pid)

    def spin(self):
        while True:
            pass

    def prepare(self, prompts, new_tokens):
        time.sleep(0.2 if self.mode == "slow to prepare" else 0.0)

    def generate(self, way, prompts, new_tokens):
        if self.mode == "fails":
            raise OverflowError("too much")
        if self.mode == "ends":
            print("cannot go on", file=sys.stderr, flush=True)
            os._exit(3)
        if self.mode == "hangs":
            time.sleep(60)
        if self.mode == "short":
            return [[1]]
        return [[(sum(prompt) + i) % 7 for i in range(new_tokens)] for prompt in prompts]

    def sessions(self, **loop):
        self.waiting = []
        return conversations.run(self, **loop)

    def add(self, number, prompt, new_tokens):
        self.waiting.append((number, [1] * new_tokens, True, len(prompt) // 2))

    def step(self):
        done, self.waiting = self.waiting, []
        return done

if __name__ == "__main__":
    serve(Fake)
"""


@pytest.fixture
def fake_peer(tmp_path: Path) -> Path:
    """Path of the script; ``mode`` among its settings says how it behaves."""
    path = tmp_path / "serve_fake.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def peer_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """A module of lab/peers as its own process would import it."""
    from importlib import import_module

    monkeypatch.syspath_prepend(str(PEERS_FOLDER))
    return import_module
