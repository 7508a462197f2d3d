"""A pytest plugin that runs beside nbval in the process of one submission: it tells the grader of every cell as it goes.

nbval by itself believes what it is shown: a cell whose error was not displayed has passed. So the kernel's own reply ("ok" or
"error") is reported as well, and the output that came with it. The notebook is removed from disk once it has been read, so that
no answer can read the checks. Reports are signed with a key that the grader hands over, and this process closes its memory and
files to others, so that an answer can neither write a report nor read the key (unless it runs as root).

Kernels are reached by sockets in the run's own folder instead of TCP ports: a port is chosen before the kernel takes it, and two
that start at once may choose the same.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from queue import Empty
from typing import Any, NoReturn

import pytest

from minikv.classroom.grading.supervise import PR_SET_DUMPABLE, control_process

# nbval imports jsonschema, which compiles grammars of web addresses for 1.6 s where this is installed. No notebook needs them.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

REACH = '[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == "MinikvGuard"][0]'
"""How the guard is reached without any name that an answer could have bound."""
SEAL = f"""(lambda guard, checks: hash((
    tuple((id(live), tuple(map(id, saved.values())), counts) for live, saved, counts in guard["_dicts"]),
    tuple((id(kind), tuple(map(id, saved.values())), counts) for kind, saved, counts in guard["_classes"]),
    tuple(tuple(map(id, each)) for each in guard["_functions"]), tuple(map(id, guard["_settings"])),
    tuple((id(now), tuple(map(id, before))) for now, before in guard["_lists"]),
    tuple(map(id, guard["_given"].values())), tuple(map(id, guard["_builtins"].values())), id(guard["_notebook"]), id(guard["_changes"]),
    tuple((id(each), id(getattr(each, "__code__", None)), id(getattr(each, "__defaults__", None)))
          for names in (guard, vars(guard["MinikvGuard"]), vars(checks)) for each in names.values()
          for each in [getattr(each, "__func__", each)] if callable(each)))))(
    {REACH}.begin.__globals__, {REACH}.begin.__globals__["checks"])"""
"""A number that is another one when the guard, what it remembers, or a function of the checks has been exchanged."""
RESTORED = f"{REACH}.begin('')"
HELD = f'{REACH}.begin.__globals__["checks"]._held["comparisons"]'
THREADS = '__import__("sys")._current_frames().__len__()'
OUTPUT_S = 60
"""How long the output of a cell may lag behind its end; nbval's own 5 s are too little for a machine that is busy."""
SHOWN_BYTES = 1_000_000  # of a cell's output; what comes after is dropped
OUTPUT_BYTES = 50_000_000  # of a cell: then it is stopped
TAIL = 20_000


class KernelGone(Exception):
    """The kernel has ended."""


class TooMuchOutput(Exception):
    """A cell printed more than anyone would read."""


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--minikv-report-fd", type=int, help="where reports go, a signature and a JSON object a line")
    parser.addoption("--minikv-key-fd", type=int, help="where the key to sign them with comes from")


def pytest_configure(config: Any) -> None:
    fd, key_fd = config.getoption("--minikv-report-fd"), config.getoption("--minikv-key-fd")
    if fd is not None:
        control_process(PR_SET_DUMPABLE, 0)
        os.set_inheritable(fd, False)
        with open(key_fd, "rb") as file:
            key = file.read()
        _use_local_sockets()
        config.pluginmanager.register(Reporter(fd, key))


def _use_local_sockets() -> None:
    """Let nbval start its kernel with sockets beside the folder that both processes start in; the path of one may be 100 bytes long."""
    kernels: Any = importlib.import_module("nbval.kernel")
    from jupyter_client.manager import KernelManager

    def manager(**settings: Any) -> KernelManager:
        return KernelManager(transport="ipc", ip="../socket", **settings)

    kernels.KernelManager = manager


class Reporter:
    """Reports each cell's start and end."""

    def __init__(self, fd: int, key: bytes) -> None:
        self.fd, self.key, self.number = fd, key, 0
        self.seal = self.threads = ""

    def report(self, **what: Any) -> None:
        body = json.dumps(what).encode()
        os.write(self.fd, signed(self.key, self.number, body) + b" " + body + b"\n")
        self.number += 1

    def pytest_collection_finish(self, session: Any) -> None:
        for path in {item.path for item in session.items}:
            Path(path).unlink()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        kernel, cell, kind = item.parent.kernel, item.cell_num, item.cell.metadata.get("minikv")
        if not isinstance(getattr(kernel, "watched", None), _Watched):
            kernel.watched = _Watched(kernel)
            item.parent.output_timeout = OUTPUT_S
        before: dict[str, str] = {}
        self.report(start=cell)
        kernel.watched.forget()
        try:
            if kind == "check":
                before = kernel.watched.ask(restored=RESTORED, seal=SEAL)
            elif kind == "given":
                before = kernel.watched.ask(seal=SEAL)
            result = yield
        except (KernelGone, TooMuchOutput) as wrong:
            self._gone(item, type(wrong).__name__)
        except Exception:
            if not kernel.is_alive():
                self._gone(item, "KernelGone")
            self._ended(item, before, passed=False)
            raise
        self._ended(item, before, passed=True)
        return result

    def _gone(self, item: Any, why: str) -> NoReturn:
        """Nothing more can be learnt in this kernel."""
        kernel = item.parent.kernel
        killed = not kernel.is_alive() and kernel.km.provisioner.process.returncode == -signal.SIGKILL
        self.report(gone=item.cell_num, why=why, killed=killed)
        os._exit(3)

    def _ended(self, item: Any, before: dict[str, str], passed: bool) -> None:
        """Also asks whether the kernel has outlived the cell: ``exit()`` ends it afterwards."""
        watched, kind = item.parent.kernel.watched, item.cell.metadata.get("minikv")
        try:
            put_back = {} if kind == "check" else {"restored": RESTORED}  # what an answer has changed, at once
            after = watched.ask(**put_back, seal=SEAL, held=HELD, threads=THREADS)
        except (KernelGone, TooMuchOutput) as wrong:
            self._gone(item, type(wrong).__name__)
        sound = kind in ("answer", "added") or not self.seal or before["seal"] == self.seal
        if kind == "check":
            sound = sound and after["seal"] == self.seal
        elif kind == "given" and passed and sound:
            self.seal = after["seal"]
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
            compared=int(after["held"]) if after.get("held", "").isdecimal() else 0,
            sound=sound,
            threads=self._new_threads(after.get("threads", ""), kind),
        )

    def _new_threads(self, now: str, kind: str) -> bool:
        """Whether there are more threads than after our own cells."""
        if kind == "given":
            self.threads = now
        return kind in ("answer", "added") and now.isdecimal() and self.threads.isdecimal() and int(now) > int(self.threads)


def signed(key: bytes, number: int, body: bytes) -> bytes:
    """The signature of the report with this number: nobody else can write one, and none counts twice."""
    return hmac.new(key, b"%d %s" % (number, body), hashlib.sha256).hexdigest().encode()


class _Watched:
    """A kernel of nbval whose messages are read as they come, counted, and dropped when there are too many."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.client = kernel, kernel.kc
        self.waiting: deque[Any] = deque()
        self.bytes, self.status, self.answered = 0, "", dict[str, Any]()
        kernel.await_reply, kernel.get_message = self.await_reply, self.get_message

    def forget(self) -> None:
        self.bytes, self.status = 0, ""

    def ask(self, **expressions: str) -> dict[str, str]:
        """The values of ``expressions`` in the kernel as text, by a way that the hooks on a cell's text do not see."""
        status, self.answered = self.status, {}
        asked = self.client.execute("", silent=True, store_history=False, user_expressions=expressions, allow_stdin=False)
        self.await_reply(asked)
        self.status = status
        return {name: str(self.answered.get(name, {}).get("data", {}).get("text/plain", "")) for name in expressions}

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
                self.answered = message["content"].get("user_expressions") or {}
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
