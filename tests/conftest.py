"""For all tests: tiny models run on one thread (more would only wait for each other), and no property test has a deadline.

Without a GPU, Triton's kernels run in its interpreter. Triton decides that when it is first imported, so it is said here.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
settings.register_profile("minikv", deadline=None)
settings.load_profile("minikv")


@pytest.fixture
def displayed(monkeypatch) -> list[SimpleNamespace]:
    """What is shown by ``IPython.display.display(data, raw=True, metadata=...)``, as it would reach a notebook's outputs."""
    import IPython.display

    shown: list[SimpleNamespace] = []

    def display(data, *, raw, metadata=None):
        assert raw
        shown.append(SimpleNamespace(data=data, metadata=metadata or {}))

    monkeypatch.setattr(IPython.display, "display", display)
    return shown
