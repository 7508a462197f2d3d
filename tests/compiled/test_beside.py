"""Compiling in two processes at once: it works, and whatever goes wrong with the other one does no harm."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from minikv.compiled import beside, fused


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.fixture
def started(monkeypatch):
    """The processes that were begun."""
    processes = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return processes


FRESH = """
    import torch
    torch.set_num_threads(2)
    from minikv.compiled import beside, cfunction, fused
    assert not cfunction.is_kept(fused._fused)
    with beside.compiling(fused.fused_product, torch.float32, 8, kept=False):
        pass
    assert cfunction.is_kept(fused._fused)
    assert fused.fused_product(torch.float32, 8)
    print(cfunction._keep[-1].cache_hits)
"""


def test_the_other_process_leaves_the_kernel_on_disk(tmp_path: Path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FRESH)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "1\n", done.stderr


def test_no_process_for_what_is_kept_or_on_one_thread_or_without_a_python(started, monkeypatch):
    with beside.compiling(fused.fused_product, torch.float32, 8, kept=True):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 1)
        with beside.compiling(fused.fused_product, torch.float32, 8, kept=False):
            pass
    for name, value in (("executable", None), ("frozen", True)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, value, raising=False)
            with beside.compiling(fused.fused_product, torch.float32, 8, kept=False):
                pass
    assert not started


def test_a_path_with_anything_in_it(started, monkeypatch, tmp_path: Path):
    """Nothing is imported from the folder in which somebody happens to be."""
    (tmp_path / "torch.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), tmp_path, 3])
    monkeypatch.setattr(beside, "PROGRAM", "import torch; torch.zeros(1)")
    with beside.compiling(fused.fused_product, torch.float32, 8, kept=False):
        pass
    assert started[0].returncode == 0
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr(sys, "path", [*sys.path, "a\0b"])
    with beside.compiling(fused.fused_product, torch.float32, 8, kept=False):
        pass
    assert len(started) == 1


def test_where_no_process_may_start(monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    came = []
    with beside.compiling(fused.fused_product, torch.float32, 8, kept=False):
        came.append(True)
    assert came


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import time; time.sleep(100)"])
def test_a_process_that_fails_or_hangs_is_not_missed(program, started, monkeypatch):
    monkeypatch.setattr(beside, "PROGRAM", program)
    monkeypatch.setattr(beside, "MOST_SECONDS", 0.5)
    with beside.compiling(fused.fused_product, torch.float32, 8, kept=False):
        pass
    assert started[0].poll() is not None


def test_who_is_interrupted_leaves_no_process_behind(started, monkeypatch):
    monkeypatch.setattr(beside, "PROGRAM", "import time; time.sleep(100)")
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), beside.compiling(fused.fused_product, torch.float32, 8, kept=False):
        raise KeyboardInterrupt
    assert started[0].poll() is not None
    assert time.monotonic() - begun < 60
