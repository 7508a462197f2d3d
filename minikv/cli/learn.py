"""open the course in JupyterLab, in a working copy of your own

The chapters are copied, outputs cleared, into a folder where you may change whatever you like. When you come back, your
copy is found again and nothing in it is overwritten. Ctrl-C ends JupyterLab."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from minikv.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("course"), metavar="F", help="where your copy is kept (default ./course)")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open no browser")


def run(arguments: argparse.Namespace) -> int:
    from minikv.classroom.working_copy import FIRST, copy_chapters

    if find_spec("jupyterlab") is None:
        raise RequestError("JupyterLab is not installed in this environment: pip install -r requirements.txt")
    for line in copy_chapters(arguments.folder).report():
        print(line, flush=True)
    command = [sys.executable, "-m", "jupyterlab", *jupyter_options(arguments.folder.resolve(), FIRST)]
    if arguments.no_browser:
        command.append("--no-browser")
    jupyter = subprocess.Popen(command, env={**os.environ, "JUPYTER_CONFIG_PATH": _config_path()})
    # A Ctrl-C reaches JupyterLab as well; it ends its kernels, and then we end. A kill is passed on.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: jupyter.terminate())
    try:
        status = jupyter.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def jupyter_options(folder: Path, first: str) -> list[str]:
    """Options of JupyterLab: this machine only, this folder only, and one Ctrl-C ends it."""
    options = [
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{first}",
        "--ServerApp.answer_yes=True",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # in a container one is root, and JupyterLab would not start
        options.append("--allow-root")
    return options


def _config_path() -> str:
    """Where JupyterLab finds our defaults, besides where it would look anyway: it does not ask whether it may fetch news."""
    from minikv import classroom

    ours = str(Path(classroom.__file__).parent / "jupyter")
    return os.pathsep.join(filter(None, (os.environ.get("JUPYTER_CONFIG_PATH"), ours)))
