"""Shared by all tests: no hub, one started four-rank world and one finished run per session, tiny profiles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A job that a script starts in the background has Ctrl-C ignored, and so have its children, which tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep everything that starts Ray on one test process, so that one world serves it all."""
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a pytest under which xdist's groups fall apart in silence: every process would start its own Ray."""
    grouped = session.config.getvalue("loadgroup") if hasattr(session.config.option, "loadgroup") else False
    astray = [
        item.nodeid for item in session.items if grouped and "@" not in item.nodeid and item.get_closest_marker("ray")
    ]
    if astray:
        raise pytest.UsageError(f"{astray[0]} was not kept in its group: this pytest is not one that xdist knows")


class Quiet:
    """A reporter that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, row: Any, total: int) -> None:
        self.rows.append(dict(row))

    def evaluated(self, row: Any) -> None:
        pass

    def done(self) -> None:
        pass


@pytest.fixture
def reporter() -> Quiet:
    return Quiet()


def tiny_profile(steps: int = 2, sets: tuple[str, ...] = (), look: bool = False) -> Any:
    """The tiny profile, resolved, with four rows; no evaluation or grids unless `look`."""
    from nftctl.profile.load import bundled_profiles, load_profile

    quiet = () if look else ('eval.prompt_file=""', "samples.prompts=0", "logging.tensorboard=false")
    quiet = ("data.rows_per_step=4", *quiet)
    return load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=[*quiet, *sets], flags={"rl.max_steps": steps}, env={})


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """`tiny_profile`, for tests."""
    return tiny_profile


@pytest.fixture(scope="session")
def world4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Four ranks over gloo in their own processes, started once; each writes a log."""
    from nftctl.engine.group import Group
    from nftctl.profile.load import bundled_profiles, load_profile

    profile = load_profile(bundled_profiles()["tiny_t2i_cpu"], env={}).profile
    started: list[Any] = []
    try:
        yield Group.start(profile, tmp_path_factory.mktemp("world4"), started.append)
    finally:
        for group in started:
            group.shutdown()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two ranks through the installed command that nobody touched, with evaluation and grids.

    Copy it before changing it.
    """
    from tests.engine.finished_run import make

    return make(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed command in an empty folder."""

    def run(*arguments: str, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nftctl", *arguments],
            cwd=tmp_path,
            env={**clean_environment(), "TEST_MARK": f"run-{os.getpid()}", **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run


def clean_environment() -> dict[str, str]:
    """This process's environment without anything that nftctl or Ray would read."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("NFTCTL_", "RAY_"))}
