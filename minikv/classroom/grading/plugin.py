"""A pytest plugin that runs beside nbval in the process of one submission: it tells the grader of every cell as it goes.

nbval by itself believes what it is shown: a cell whose error was not displayed has passed. So the kernel's own reply ("ok" or
"error") is reported as well, and the output that came with it. The notebook is removed from disk once it has been read, so that
no answer can read the checks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

# nbval imports jsonschema, which compiles grammars of web addresses for 1.6 s where this is installed. No notebook needs them.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

REACH = '[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == "MinikvGuard"][0]'
"""How the guard is reached without any name that an answer could have bound."""
SHOWN_BYTES = 1_000_000  # of a cell's output; what comes after is dropped
OUTPUT_BYTES = 50_000_000  # of a cell: then it is stopped
TAIL = 20_000


class KernelGone(Exception):
    """The kernel has ended."""


class TooMuchOutput(Exception):
    """A cell printed more than anyone would read."""


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--minikv-report-fd", type=int, help="where reports go, a JSON object a line")


def pytest_configure(config: Any) -> None:
    if config.getoption("--minikv-report-fd") is not None:
        os.set_inheritable(config.getoption("--minikv-report-fd"), False)
        config.pluginmanager.register(Reporter(config.getoption("--minikv-report-fd")))


class Reporter:
    """Reports each cell's start and end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def report(self, **what: Any) -> None:
        os.write(self.fd, json.dumps(what).encode() + b"\n")

    def pytest_collection_finish(self, session: Any) -> None:
        for path in {item.path for item in session.items}:
            Path(path).unlink()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        kernel, cell = item.parent.kernel, item.cell_num
        if not isinstance(getattr(kernel, "watched", None), _Watched):
            kernel.watched = _Watched(kernel)
        self.report(start=cell)
        kernel.watched.forget()
        try:
            kernel.watched.put_back(item.cell.metadata.get("minikv") == "check")
            result = yield
        except (KernelGone, TooMuchOutput) as wrong:
            self.report(gone=cell, why=type(wrong).__name__)
            os._exit(3)  # nothing more can be learnt in this kernel
        except Exception:
            if not kernel.is_alive():
                self.report(gone=cell, why="KernelGone")
                os._exit(3)
            self._ended(item, passed=False)
            raise
        self._ended(item, passed=True)
        return result

    def _ended(self, item: Any, passed: bool) -> None:
        """Also asks whether the kernel has outlived the cell: ``exit()`` ends it afterwards."""
        watched = item.parent.kernel.watched
        if item.cell.metadata.get("minikv") in ("answer", "added"):
            try:
                watched.put_back(True)
            except (KernelGone, TooMuchOutput) as wrong:
                self.report(gone=item.cell_num, why=type(wrong).__name__)
                os._exit(3)
        outputs = item.test_outputs or []
        errors = [output for output in outputs if output.output_type == "error"]
        said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
        self.report(
            end=item.cell_num,
            passed=passed and watched.status == "ok",
            stdout=said[-TAIL:],
            cut=len(said) > TAIL or watched.bytes > SHOWN_BYTES,
            ename=str(errors[0].ename)[:200] if errors else "",
            evalue=str(errors[0].evalue)[:TAIL] if errors else "",
            much=watched.bytes > SHOWN_BYTES,
        )


class _Watched:
    """A kernel of nbval whose messages are read as they come, counted, and dropped when there are too many."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.client = kernel, kernel.kc
        self.waiting: deque[Any] = deque()
        self.bytes, self.status = 0, ""
        kernel.await_reply, kernel.get_message = self.await_reply, self.get_message

    def forget(self) -> None:
        self.bytes, self.status = 0, ""

    def put_back(self, wanted: bool) -> None:
        """Let the guard restore everything, by a way that the hooks on a cell's text do not see."""
        if wanted:
            status = self.status
            expression = {"restored": f"{REACH}.begin('')"}
            asked = self.client.execute("", silent=True, store_history=False, user_expressions=expression, allow_stdin=False)
            self.await_reply(asked)
            self.status = status

    def await_reply(self, msg_id: str, timeout: float | None = None) -> None:
        """Until the reply has come; the grader sees to the time."""
        checked = time.monotonic()
        while True:
            self._drain()
            try:
                message = self.client.get_shell_msg(timeout=0.05)
            except Empty:
                if time.monotonic() > checked + 0.2:
                    checked = time.monotonic()
                    if not self.kernel.is_alive():
                        raise KernelGone from None
                continue
            if message["parent_header"].get("msg_id") == msg_id:
                self.status = message["content"].get("status", "")
                if any(each.get("source") == "ask_exit" for each in message["content"].get("payload", ())):
                    raise KernelGone  # exit() was called: it goes a moment later, and would be laid to another cell's charge
                return

    def _drain(self) -> None:
        for _ in range(1000):
            try:
                message = self.client.get_iopub_msg(timeout=0)
            except Empty:
                return
            self._take(message)

    def _take(self, message: Any) -> None:
        content = message["content"]
        if message["msg_type"] in ("stream", "display_data", "execute_result", "update_display_data", "error"):
            self.bytes += len(content.get("text", "")) + sum(len(str(each)) for each in content.get("data", {}).values())
            self.bytes += len(content.get("evalue", ""))
            if self.bytes > OUTPUT_BYTES:
                raise TooMuchOutput
            if self.bytes > SHOWN_BYTES:
                if "text" in content:
                    content["text"] = content["text"][-2000:]
                if "data" in content:
                    content["data"] = {}
        self.waiting.append(message)

    def get_message(self, stream: str, timeout: float | None = None) -> Any:
        if stream != "iopub":
            return self.client.get_shell_msg(timeout=timeout)
        if not self.waiting:
            self._take(self.client.get_iopub_msg(timeout=timeout))
        return self.waiting.popleft()
