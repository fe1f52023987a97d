"""Shared by all tests: no hub, one started four-rank world and one finished run per session, tiny profiles."""

from __future__ import annotations

import gc
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while modules are imported: there is little of it, and it is looked for a hundred times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep what shares a started world on one test process, and what starts Ray itself, one after the other, on one.

    These two are the longest and come first, so that no process waits for the other in the end.
    """
    groups = {item: group for item in items if (group := _group(item))}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    order = ["ray", "world", "gloo", "torch", ""]
    items.sort(key=lambda item: order.index(groups.get(item, "")))


def _group(item: pytest.Item) -> str:
    """What a test shares with tests of other files: a started world, a machine for Ray, or a process to be forked."""
    if item.get_closest_marker("ray"):
        return "world" if "world4" in getattr(item, "fixturenames", ()) else "ray"
    if "run_world" in vars(getattr(item, "module", item)):
        return "gloo"
    return "torch" if item.path.name in ("test_convert.py", "test_export.py", "test_forks.py", "test_shards.py") else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups as `--dist loadgroup` knows them, and all other tests by their files, so that fixtures are made once."""
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return scope if scope != nodeid else nodeid.partition("::")[0]

    return Files(config, log) if config.getvalue("dist") == "loadgroup" else None


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
    """The tiny profile, resolved, with four rows and sampler steps; no evaluation or grids unless `look`."""
    from nftctl.profile.load import bundled_profiles, load_profile

    quiet = () if look else ('eval.prompt_file=""', "samples.prompts=0", "logging.tensorboard=false")
    quiet = ("data.rows_per_step=4", "rl.sample_steps=4", *quiet)
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


class Scorers:
    """Embedded reward services that outlive the run that started them, for the next run that asks for the same.

    Each is started by the program itself and asked by every run who it is; that a run starts its own and ends it is
    in tests/engine/test_services.py, and in every run through the installed command.
    """

    def __init__(self) -> None:
        from nftctl.engine import services

        self._begin, self._end = services._start, services._stop
        self._idle: dict[tuple[str, ...], list[tuple[Any, str]]] = {}
        self._asked: dict[int, tuple[str, ...]] = {}
        self._urls: dict[int, str] = {}

    def start(self, provider: Any, revision: str, log: Path, host: str) -> tuple[Any, str]:
        key = (provider.scorer, revision, host, os.environ.get(provider.token_env, ""))
        while idle := self._idle.get(key):
            process, url = idle.pop()
            if process.poll() is None:
                return process, url
        process, url = self._begin(provider, revision, log, host)
        self._asked[process.pid], self._urls[process.pid] = key, url
        return process, url

    def stop(self, process: Any) -> None:
        if process.pid not in self._asked:
            self._end(process)
        else:
            self._idle.setdefault(self._asked[process.pid], []).append((process, self._urls[process.pid]))

    def close(self) -> None:
        for idle in self._idle.values():
            for process, _ in idle:
                self._end(process)


@pytest.fixture(scope="module")
def scorers() -> Iterator[Scorers]:
    """Those of one file of tests."""
    made = Scorers()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _scorers_stay_from_run_to_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """For runs on the started world, each of which would wait a second for the same process once more."""
    if "world4" not in request.fixturenames:
        yield
        return
    from nftctl.engine import services

    made = request.getfixturevalue("scorers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "_start", made.start)
        patch.setattr(services, "_stop", made.stop)
        yield


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
