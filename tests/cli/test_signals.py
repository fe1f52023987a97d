"""The first signal asks, the second ends; real signals to real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nftctl.cli.signals import Stopped, StopSignals

from .program import environment

LOOP = """
import os, signal, sys, time
import nftctl.cli.main as program
from nftctl.cli.signals import StopSignals

def job(**kwargs):
    asked = []
    with StopSignals() as signals:
        if "armed" in sys.argv:
            stages = [word for word in sys.argv if word.endswith("ing")]
            signals.arm(asked.append, lambda: 11, lambda: "".join(stages))
        print("ready", flush=True)
        if "deaf" in sys.argv:  # in one call until a byte comes, and not to be interrupted
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            os.read(0, 1)
        while not asked or "stubborn" in sys.argv:
            time.sleep(0.01)
    print(f"asked {asked[0]}", flush=True)
    return 128 + asked[0]

program.app = job
sys.exit(program.main())
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, *words], cwd=folder, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_says_so(tmp_path: Path, signum: int, code: int) -> None:
    process = start(tmp_path, "armed")
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, f"asked {int(signum)}\n")
    assert "finishing step 12, then saving; press again to stop now" in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_ends_at_once(tmp_path: Path, signum: int, code: int) -> None:
    process = start(tmp_path, "armed", "stubborn")
    process.send_signal(signum)
    assert process.stderr
    while "finishing step" not in process.stderr.readline():
        pass
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "stopped at once" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_counts_though_the_main_thread_hears_neither(tmp_path: Path, signum: int, code: int) -> None:
    """In the middle of a call into C the interpreter keeps one signal of a kind, however many came.

    That the first is answered at all, while the main thread sleeps, shows that another one listens.
    """
    process = start(tmp_path, "armed", "stubborn", "deaf")
    process.send_signal(signum)
    assert process.stderr
    while "finishing step" not in process.stderr.readline():
        pass
    process.send_signal(signum)
    _, err = process.communicate("x", timeout=30)
    assert process.returncode == code
    assert "stopped at once" in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_while_a_job_starts_the_first_signal_ends_it_and_says_so(tmp_path: Path, signum: int, code: int) -> None:
    process = start(tmp_path, "armed", "starting")
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    name = signal.Signals(signum).name
    assert err.splitlines() == [
        "", "ending the start, a matter of seconds; press again to stop now",
        f"stopped at once by {name}; nothing was saved",
    ]  # fmt: skip


def test_after_the_last_step_no_further_one_is_spoken_of(tmp_path: Path) -> None:
    process = start(tmp_path, "armed", "ending")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "asked 2\n")
    assert err == "\nthe last step is done: ending; press again to stop now\n"


AGAIN = """
import atexit, importlib.abc, signal, sys

def press(*args):
    signal.raise_signal(signal.SIGINT)

class InImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "typer":
            press()

if "import" in sys.argv:
    sys.meta_path.insert(0, InImport())
import nftctl.cli.main as program
import nftctl.cli.validate

say = program.Console.say
if "answer" in sys.argv:
    program.Console.say = lambda self, text: (press(), say(self, text))
if "command" in sys.argv:
    nftctl.cli.validate.list_rules = lambda **options: press()
if "exit" in sys.argv:
    atexit.register(press)
sys.argv[1:] = ["validate", "--rules"]
sys.exit(program.main())
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("import", 130, "interrupted\n"),
        ("command", 130, "interrupted\n"),
        ("command answer exit", 130, "interrupted\n"),
        ("exit", 0, ""),
    ],
)
def test_an_interrupted_command_ends_with_its_code_and_one_line(
    tmp_path: Path, words: str, code: int, said: str
) -> None:
    """Wherever it is, and when the signal comes again while it is answered and while the interpreter leaves."""
    answer = subprocess.run(
        [sys.executable, "-c", AGAIN, *words.split()], cwd=tmp_path, env=environment(), text=True, timeout=30,
        capture_output=True, check=False,
    )  # fmt: skip
    assert (answer.returncode, answer.stderr) == (code, said)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_there_is_anything_to_save_one_signal_is_enough(tmp_path: Path, signum: int, code: int) -> None:
    process = start(tmp_path)
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in err


def test_the_former_handlers_come_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals():
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] != before
    with pytest.raises(Stopped), StopSignals():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


WAITING = """
import os, signal, threading, time
from nftctl.cli.signals import Stopped, StopSignals

def press():
    time.sleep(0.03)
    os.kill(os.getpid(), signal.SIGINT)

for _ in range(10):
    try:
        with StopSignals():
            presses = threading.Thread(target=press)
            presses.start()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
    except Stopped:
        presses.join()
        print("stopped", flush=True)
"""


def test_a_command_that_waits_in_a_lock_is_ended_too(tmp_path: Path) -> None:
    """Ten times over: whether the main thread is woken depended on which thread was first."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE
    )
    try:
        out, _ = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it waits still, after {process.communicate()[0].count('stopped')} of 10")
    assert (process.returncode, out) == (0, "stopped\n" * 10)
