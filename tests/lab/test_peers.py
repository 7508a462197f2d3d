"""Peers: one line of JSON each way, a process that is stopped between its turns, and a reason for all that does not run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

import minikv
from minikv.lab import agentic
from minikv.lab.bookkeeping import NothingRunner
from minikv.lab.peers import environments
from minikv.lab.peers.environments import KINDS, Kind, PeerError, python_for
from minikv.lab.peers.process import PeerProcess
from minikv.lab.workload import Session, Workload, run_sessions

PROMPTS = [[1, 2], [3, 4, 5]]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@contextmanager
def opened(script: Path, mode: str = "good", **limits: float) -> Iterator[PeerProcess]:
    peer = PeerProcess(sys.executable, script, 3, {"folder": "nowhere", "mode": mode}, **limits)
    try:
        yield peer
    finally:
        peer.close()


def state(pid: int) -> str:
    """R running, S sleeping, T stopped, or empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(condition) -> None:  # type: ignore[no-untyped-def]
    until = monotonic() + 10
    while not condition():
        assert monotonic() < until, "it did not happen within 10 s"
        sleep(0.01)


# ---------------------------------------------------------------- the line


def test_a_peer_answers_whatever_its_library_prints(fake_peer: Path) -> None:
    with opened(fake_peer) as peer:
        assert peer.about == {
            "version": "fake 1.0, 3 threads, ('3', False, [])",
            "alone": ["fake"],
            "together": ["fake", "fake, one by one"],
        }
        for _ in range(2):
            answer = peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=3)
            assert answer["tokens"] == [[3, 4, 5], [5, 6, 0]]
            assert 0 <= answer["seconds"] < 10


def test_the_clock_starts_after_the_preparation(fake_peer: Path) -> None:
    with opened(fake_peer, "slow to prepare") as peer:
        start = monotonic()
        seconds = peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=3)["seconds"]
        assert monotonic() - start - seconds > 0.19


def test_a_failure_is_told_and_the_peer_lives_on(fake_peer: Path) -> None:
    with opened(fake_peer, "fails") as peer:
        for _ in range(2):
            with pytest.raises(PeerError, match="OverflowError: too much"):
                peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=3)


def test_too_few_tokens_are_a_failure(fake_peer: Path) -> None:
    with opened(fake_peer, "short") as peer, pytest.raises(PeerError, match="1 of 2 requests finished"):
        peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=3)


def test_a_missing_package_is_named(fake_peer: Path) -> None:
    with pytest.raises(PeerError, match="no_such_package_anywhere"):
        PeerProcess(sys.executable, fake_peer, 1, {"folder": "", "mode": "absent"})


def test_a_peer_that_ends_leaves_its_last_words(fake_peer: Path) -> None:
    with opened(fake_peer, "ends") as peer:
        with pytest.raises(PeerError, match=r"cannot go on \(exit status 3\)"):
            peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=3)
        with pytest.raises(PeerError, match="it has ended"):
            peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=3)


def test_a_peer_that_hangs_is_ended(fake_peer: Path) -> None:
    with opened(fake_peer, "hangs", answer_s=0.3) as peer:
        start = monotonic()
        with pytest.raises(PeerError, match=r"no answer to 'generate' within 0\.3 s"):
            peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=3)
        assert monotonic() - start < 4
        assert peer._process.poll() is not None
        with pytest.raises(PeerError, match="it has ended"):
            peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=3)


def test_a_script_that_cannot_start_says_so(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import no_such_package_anywhere")
    with pytest.raises(PeerError, match=r"No module named 'no_such_package_anywhere' \(exit status 1\)"):
        PeerProcess(sys.executable, tmp_path / "wrong.py", 1, {})


def test_a_script_that_does_not_come_up_is_ended(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    with pytest.raises(PeerError, match=r"no answer to 'open' within 0\.2 s"):
        PeerProcess(sys.executable, tmp_path / "slow.py", 1, {}, open_s=0.2)


# ---------------------------------------------------------------- the others' turn


@LINUX
def test_between_its_turns_a_peer_and_its_children_are_stopped(fake_peer: Path) -> None:
    with opened(fake_peer, "busy") as peer:
        mine, child = peer._process.pid, int(peer.about["version"])
        for _ in range(2):
            wait_for(lambda: state(mine) == "T" and state(child) == "T")
            assert peer.ask("generate", way="fake", prompts=PROMPTS, new_tokens=1)["tokens"] == [[3], [5]]
    wait_for(lambda: state(mine) == "" and state(child) in ("", "Z"))


@LINUX
def test_a_stopped_peer_does_not_outlive_us(fake_peer: Path) -> None:
    code = f"""
import time
from minikv.lab.peers.process import PeerProcess
peer = PeerProcess({sys.executable!r}, {str(fake_peer)!r}, 1, {{"folder": "", "mode": "good"}})
print(peer._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as us:
        assert us.stdout is not None
        peer = int(us.stdout.readline())
        wait_for(lambda: state(peer) == "T")
        us.send_signal(signal.SIGKILL)
    wait_for(lambda: state(peer) in ("", "Z"))


# ---------------------------------------------------------------- which Python

KIND = Kind("fake", "serve_fake.py", "no_such_package_anywhere", ("one==1", "two==2"), "tiny", not_wanted=("three",))


@pytest.fixture
def made(monkeypatch, tmp_path: Path) -> list[tuple[str, ...]]:  # type: ignore[no-untyped-def]
    """What was made and installed; nothing really is."""
    done: list[tuple[str, ...]] = []

    def create(folder: Path, clear: bool, with_pip: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        done.append(("create", folder.name))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments.venv, "create", create)
    monkeypatch.setattr(environments, "_pip", lambda python, *words: done.append(words))
    return done


def test_a_told_python_is_taken(tmp_path: Path) -> None:
    assert python_for(KIND, {"fake": sys.executable}, print) == sys.executable
    with pytest.raises(PeerError, match="is no Python"):
        python_for(KIND, {"fake": str(tmp_path / "bin" / "python")}, print)


def test_our_own_python_is_taken_when_the_peer_is_there(made) -> None:  # type: ignore[no-untyped-def]
    here = Kind("fake", "serve_fake.py", "pytest", ("one",), "tiny")
    assert python_for(here, {}, print) == sys.executable
    assert made == []


def test_an_environment_is_made_once_and_after_saying_so(made, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said: list[tuple[str, int]] = []
    paths = {python_for(KIND, {}, lambda text: said.append((text, len(made)))) for _ in range(2)}
    folder = tmp_path / "minikv" / "peers" / "fake"
    assert [Path(path).parent.parent for path in paths] == [folder]
    assert made == [("create", "fake"), ("install", "one==1", "two==2"), ("uninstall", "--yes", "three")]
    ((text, before),) = said
    assert before == 0
    for word in (str(folder), "one==1", "two==2", "tiny"):
        assert word in text
    newer = Kind("fake", "serve_fake.py", "no_such_package_anywhere", ("one==1.1",), "tiny")
    python_for(newer, {}, lambda text: None)
    assert made[3:] == [("create", "fake"), ("install", "one==1.1")]


def test_what_could_not_be_installed_is_said_and_removed(made, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def pip(python: Path, *words: str) -> None:
        raise PeerError("no network")

    monkeypatch.setattr(environments, "_pip", pip)
    with pytest.raises(PeerError, match="could not be installed: no network"):
        python_for(KIND, {}, lambda text: None)
    assert list((tmp_path / "minikv" / "peers").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
def test_pip_is_really_called_and_its_last_line_kept(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/words"\necho first >&2\necho "ERROR: the reason" >&2\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(PeerError, match=r"^ERROR: the reason$"):
        environments._pip(python, "install", "one==1")
    assert (tmp_path / "words").read_text().split() == ["-m", "pip", "install", "one==1", "--quiet"]


def test_every_kind_has_its_script_and_fixed_versions() -> None:
    from minikv.cli import bench

    assert tuple(KINDS) == bench.PEERS
    folder = Path(environments.__file__).parent
    for kind in KINDS.values():
        assert (folder / kind.script).is_file()
        assert kind.script.removesuffix(".py") != kind.package
        assert "minikv" not in "".join(line for line in (folder / kind.script).read_text().splitlines() if "import" in line)
        assert any("==" in requirement for requirement in kind.requirements)


# ---------------------------------------------------------------- the scripts


def test_the_peers_loop_of_agents_is_ours(peer_script) -> None:  # type: ignore[no-untyped-def]
    conversations = peer_script("conversations")
    workload = Workload(system_tokens=16, turns=4, turn_tokens=6, output_tokens=3)

    class Steps:
        def __init__(self, engine: minikv.Engine) -> None:
            self.engine = engine

        def add(self, number: int, prompt: list[int], new_tokens: int) -> None:
            self.engine.add(number, prompt, minikv.Sampling(max_new_tokens=new_tokens, ignore_eos=True))

        def step(self) -> list[tuple[int, list[int], bool, int]]:
            outputs = self.engine.step()
            return [(output.request_id, output.tokens, output.finished, output.cached_tokens) for output in outputs]

    def engine() -> minikv.Engine:
        return minikv.Engine(runner=NothingRunner(40, 4), max_batch_tokens=32)

    ours = run_sessions(engine(), workload, 5)
    everyone = [Session(workload, number, NothingRunner.vocab) for number in range(5)]
    system = list(everyone[0].tokens)
    theirs = conversations.run(Steps(engine()), system, [agentic._pieces(session) for session in everyone], 3, 0.0, clock=lambda: 0.0)
    assert len(theirs) == 20
    for mine, other in zip(ours, theirs, strict=True):
        for word in ("session", "turn", "prompt_tokens", "cached_tokens", "output_tokens"):
            assert getattr(mine, word) == other[word], (mine, other)
        assert other["ttft_s"] == 0.0


def test_a_thinking_session_is_waited_for(peer_script) -> None:  # type: ignore[no-untyped-def]
    conversations = peer_script("conversations")

    class Steps:
        def add(self, number: int, prompt: list[int], new_tokens: int) -> None:
            self.waiting = [(number, [1] * new_tokens, True, 0)]

        def step(self) -> list[tuple[int, list[int], bool, int]]:
            done, self.waiting = self.waiting, []
            return done

    turns = conversations.run(Steps(), [1], [[[2], [3]]], 2, 0.05)
    assert turns[1]["arrived_at"] == turns[0]["finished_at"] + 0.05
    assert turns[1]["prompt_tokens"] == 1 + 1 + 2 + 1


def test_the_hugging_face_peer_serves_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from minikv.lab import bench
    from minikv.model.weights import save

    model = minikv.load(shape=minikv.ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=50, ffn=48, qk_norm=True))
    save(model, tmp_path)
    prompts = bench.BenchWorkload(3, 4, 9, 4).prompts(50)
    ours, _ = bench.Ours(model).generate(prompts, 4)
    with bench.open_peers(["hf"], tmp_path, model, {}, print) as (peers, missing):
        assert missing == {}
        assert peers["hf"].about["alone"] == ["hf generate"]
        assert peers["hf"].about["together"] == ["hf generate", "hf generate, one by one", "hf continuous batching"]
        for way in peers["hf"].about["together"][:2]:  # the third needs seconds to stop its thread
            assert peers["hf"].ask("generate", way=way, prompts=prompts, new_tokens=4)["tokens"] == ours, way


def test_every_weight_has_a_name_in_gguf(peer_script) -> None:  # type: ignore[no-untyped-def]
    script = peer_script("serve_llama_cpp")
    shape = minikv.ModelShape(layers=2, hidden=16, heads=2, kv_heads=1, head_dim=8, vocab=64, ffn=16, qk_norm=True, tied=False)
    names = [script._gguf_name(name) for name, _ in minikv.load(shape=shape).named_weights()]
    assert len(set(names)) == len(names) == 2 * 11 + 3
    assert {"blk.1.attn_q_norm.weight", "blk.0.ffn_down.weight", "token_embd.weight", "output.weight"} <= set(names)


def test_only_what_leads_to_our_packages_is_kept_from_a_peer(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from minikv.lab.peers.process import _environment

    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("KEPT", "yes")
    environment = _environment(2)
    assert "PYTHONPATH" not in environment
    assert environment["KEPT"] == "yes"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert os.environ["PYTHONPATH"] == "here"
