"""The program in a process that was forked from one which has imported it already.

Owns what a fresh interpreter would give and a fork does not: environment, folder, streams and arguments of its own.
Refuses nothing: `forkable` says for which calls a fork is the same as a start, and whoever asks starts the others. The
imports themselves, signals, terminals and what outlives a command are tested with processes that were started.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
LIGHT = (
    "aiohttp", "asyncio", "filelock", "numpy", "orjson", "pydantic_settings", "rich.console", "stamina",
    "tree_sitter_toml", "nftctl.cli.main", "nftctl.profile.diagnose", "nftctl.profile.load", "nftctl.profile.preflight",
    "nftctl.reward.client", "nftctl.reward.cosmos_rl", "nftctl.run.directory", "nftctl.run.manifest",
)  # fmt: skip
"""What most commands import, none of which opens a file, starts a thread or reads the environment for good."""
HEAVY = (*LIGHT, "torch", "diffusers.schedulers.scheduling_unipc_multistep", "peft")
WITH_TORCH = frozenset({"convert", "export", "sample"})
"""Commands that work on tensors."""
READ_AT_START = (
    "PYTHON", "LANG", "LC_", "LD_", "OMP_", "MALLOC_", "TZ", "HOME", "HF_", "TRANSFORMERS_", "TORCH", "CUDA_", "RAY_",
)  # fmt: skip
"""Variables that an interpreter or a library reads once, when it starts."""
ROOM = 65536
"""Bytes that fit into a pipe nobody reads yet."""


def forkable(env: Mapping[str, str], stdin: str) -> bool:
    """Whether a fork is what a start would be: nothing that is read at the start differs from this process's own."""

    def early(variables: Mapping[str, str]) -> dict[str, str]:
        return {key: value for key, value in variables.items() if key.startswith(READ_AT_START)}

    return early(env) == early(_environment()) and len(stdin.encode()) < ROOM


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Forks:
    """One process that has imported what commands need, and forks once per call."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.cli.forks", str(theirs.fileno()), *modules]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), pass_fds=[theirs.fileno()],
            # An interpreter shapes its streams by what they are: these are pipes, and so are those of every fork.
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        theirs.close()
        self._words = self._ours.makefile("r", encoding="utf-8")
        atexit.register(self._close)

    def _close(self) -> None:
        self._ours.shutdown(socket.SHUT_RDWR)
        self._process.communicate()

    def _word(self) -> str:
        word = self._words.readline()
        assert word, f"the process that forks has gone: {self._process.communicate()[1].decode()}"
        return word

    def run(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: str, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """The command with its exit code and what it wrote; kills it and raises TimeoutExpired when it takes longer."""
        pipes = [os.pipe() for _ in range(3)]
        (child_in, our_in), (our_out, child_out), (our_err, child_err) = pipes
        request = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}).encode()
        socket.send_fds(self._ours, [len(request).to_bytes(4, "big")], [child_in, child_out, child_err])
        self._ours.sendall(request)
        for descriptor in (child_in, child_out, child_err):
            os.close(descriptor)
        pid = int(self._word())
        with os.fdopen(our_in, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(stdin.encode())
        try:
            out, err = _read_all((our_out, our_err), time.monotonic() + timeout)
        except TimeoutError:
            os.kill(pid, 9)
            self._word()
            raise subprocess.TimeoutExpired(list(arguments), timeout) from None
        finally:
            os.close(our_out)
            os.close(our_err)
        return subprocess.CompletedProcess(list(arguments), int(self._word()), _text(out), _text(err))


def _text(data: bytes) -> str:
    return data.decode().replace("\r\n", "\n")


def _read_all(descriptors: tuple[int, int], end: float) -> tuple[bytes, bytes]:
    """Everything that comes until both are closed; raises TimeoutError at `end`."""
    found = dict.fromkeys(descriptors, b"")
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                chunk = os.read(key.fd, ROOM)
                found[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
    return found[descriptors[0]], found[descriptors[1]]


@functools.cache
def forks(heavy: bool) -> Forks:
    """The process of this test process from which commands are forked, started when it is first asked for."""
    return Forks(HEAVY if heavy else LIGHT)


def run(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """One command line of nftctl, forked."""
    heavy = bool(arguments) and arguments[0] in WITH_TORCH
    return forks(heavy).run(arguments, cwd=cwd, env=env, stdin=stdin, timeout=timeout)


# ---- the other side


def _serve(channel: socket.socket) -> bool:
    """Fork for each request until there are no more. True in a fork, which then is the program."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, 4, 3)
        if len(head) < 4:
            return False
        request = json.loads(_exactly(channel, int.from_bytes(head, "big")))
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(request, descriptors)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        channel.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += channel.recv(count - len(data))
    return data


def _become(request: Mapping[str, object], descriptors: Sequence[int]) -> None:
    """Take up streams, folder, environment and arguments, as a process that was started with them."""
    for stream, descriptor in enumerate(descriptors):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    env, arguments = request["env"], request["arguments"]
    assert isinstance(env, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(str(request["cwd"]))
    sys.argv = [str(ROOT / "nftctl" / "__main__.py"), *arguments]
    sys.path[0] = str(request["cwd"])


def _leave(code: int) -> NoReturn:
    """End as an interpreter does, but for taking all modules apart, which a fork would pay for with copies of them."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)


if __name__ == "__main__":
    gc.disable()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    import typer

    from nftctl.cli import main as program

    # Options and commands are made of their functions at every call: half of what a forked one would do.
    program.app = typer.main.get_command(program.app)  # type: ignore[assignment]
    gc.freeze()
    gc.enable()
    if _serve(socket.socket(fileno=int(sys.argv[1]))):
        _leave(program.main())
