"""Bases by hub id: found in a cache made here, pinned to a commit, and fetched through a stand-in for the network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from nftctl.cli.console import Console
from nftctl.cli.validate import load_checked
from nftctl.engine.plan import plan_launch
from nftctl.errors import EnvironmentUnfit, ProfileRefused
from nftctl.profile.artifacts import base_place, hub_id, inspect_base, pinned
from nftctl.profile.hub import PATTERNS, HubId
from nftctl.profile.load import Resolved, load_resolved
from nftctl.profile.preflight import check
from nftctl.run.hashing import fingerprint_base
from tests.cli.program import HEAVY, nftctl, python, the_object

from .conftest import WEIGHTS, weights_bytes, write_base

FIRST, SECOND = "a" * 40, "b" * 40
ID = "some-org/some-base@main"


def put_snapshot(hub: Path, commit: str, *, layers: tuple[int, ...] = (0, 1), ref: str = "main") -> Path:
    """A base in a cache of downloads as the hub's library lays it out: blobs, links to them, and a ref."""
    repository = hub / "models--some-org--some-base"
    made = write_base(hub / f"made-{commit[:4]}")
    (made / "transformer" / WEIGHTS).write_bytes(weights_bytes(layers))
    snapshot = repository / "snapshots" / commit
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    for file in [path for path in made.rglob("*") if path.is_file()]:
        blob = repository / "blobs" / f"{commit[:4]}-{file.relative_to(made).as_posix().replace('/', '-')}"
        file.rename(blob)
        link = snapshot / file.relative_to(made)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    shutil.rmtree(made)
    point(hub, commit, ref)
    return snapshot


def point(hub: Path, commit: str, ref: str = "main") -> None:
    """Let a branch stand for a commit."""
    refs = hub / "models--some-org--some-base" / "refs"
    refs.mkdir(parents=True, exist_ok=True)
    (refs / ref).write_text(commit)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of downloads that the library looks into; no network."""
    place = tmp_path / "home" / "hub"
    place.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return place


@pytest.mark.parametrize("value", ["org/name", "name@main", "org/name@", "a/b/c@main", "org/name@a b", "", "embedded"])
def test_what_is_no_hub_id(value: str) -> None:
    assert HubId.parse(value) is None
    assert hub_id(value) is None


def test_a_branch_a_tag_and_a_commit_lead_to_the_snapshot(hub: Path) -> None:
    snapshot = put_snapshot(hub, FIRST)
    point(hub, FIRST, "v1.0")
    for revision in ("main", "v1.0", FIRST):
        value = f"some-org/some-base@{revision}"
        assert base_place(value) == snapshot
        assert inspect_base(value).kind == "diffusers"
        assert pinned(value) == f"some-org/some-base@{FIRST}"
    assert HubId("some-org/some-base", "v2").cached() is None
    assert pinned("some-org/some-base@v2") == "some-org/some-base@v2"


def test_a_local_folder_of_that_name_comes_first(hub: Path, place: Path) -> None:
    put_snapshot(hub, FIRST)
    write_base(place / ID)
    assert base_place(ID) == Path(ID)
    assert pinned(ID) == ID


Load = Callable[..., Resolved]


def test_a_base_in_the_cache_is_a_base(hub: Path, load: Load) -> None:
    put_snapshot(hub, FIRST)
    assert check(load({"rl.init_from": ID})) == []


def test_a_base_that_is_not_there_is_refused_with_the_command_that_fetches_it(
    hub: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = check(load({"rl.init_from": ID}))
    assert (finding.code, finding.key) == ("init-from-hub", "rl.init_from")
    assert finding.message == f'rl.init_from = "{ID}" is not in the local cache of downloads'
    command = "hf download some-org/some-base --revision main --include '*/*.safetensors' --include '*.json' "
    assert finding.help.startswith(f"HF_HUB_OFFLINE is set; without it: {command}")
    assert not any(word in finding.help for word in (".bin", ".pt", ".pkl", ".ckpt"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (finding,) = check(load({"rl.init_from": ID}))
    assert finding.help.startswith(f"nftctl launch downloads it, or now: {command}")


def test_a_snapshot_that_was_fetched_in_part_is_said_to_be(hub: Path, load: Load) -> None:
    snapshot = put_snapshot(hub, FIRST)
    (snapshot / "transformer" / WEIGHTS).unlink()
    (finding,) = check(load({"rl.init_from": ID}))
    assert finding.code == "init-from-weights"
    assert finding.help.startswith("hf download some-org/some-base --revision main")
    (snapshot / "model_index.json").unlink()
    (finding,) = check(load({"rl.init_from": ID}))
    assert finding.code == "init-from-hub"
    assert "is not whole in the local cache of downloads" in finding.message


# -- pinned ---------------------------------------------------------------------------------------------------------


def test_a_run_records_the_commit_and_keeps_to_it_when_the_branch_moves_on(hub: Path, load: Load) -> None:
    snapshot = put_snapshot(hub, FIRST)
    plan = plan_launch(load({"rl.init_from": ID}))
    assert plan.base == snapshot
    assert plan.base_fingerprint == fingerprint_base(snapshot)
    assert plan.record()["init_from"] == plan.profile.rl.init_from == f"some-org/some-base@{FIRST}"
    put_snapshot(hub, SECOND, layers=(0, 1, 2))
    assert pinned(ID).endswith(SECOND)
    again = load_resolved(plan.profile.model_dump(), name="p", text="", env={})
    assert check(again) == []
    resumed = plan_launch(again)
    assert resumed.base == snapshot
    assert resumed.identity == plan.identity
    assert plan_launch(load({"rl.init_from": ID})).identity != plan.identity


# -- fetched --------------------------------------------------------------------------------------------------------


@pytest.fixture
def network(hub: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub that has the base; what was asked of it."""
    asked: list[dict[str, Any]] = []
    inner = huggingface_hub.snapshot_download

    def download(repository: str, **options: Any) -> str:
        if options.get("local_files_only"):
            return inner(repository, **options)
        asked.append({"repository": repository, **options})
        if repository != "some-org/some-base":
            raise ConnectionError("no route to the hub\nmore")
        return str(put_snapshot(hub, FIRST))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return asked


def test_launch_fetches_what_it_may_and_no_pickle(
    network: list[dict[str, Any]], load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    load({"rl.init_from": ID})
    resolved, _ = load_checked(Console(), "profile.toml", [], {}, fetch=True)
    assert network == [
        {"repository": "some-org/some-base", "revision": "main", "allow_patterns": list(PATTERNS)}
    ]  # fmt: skip
    assert "downloading some-org/some-base at main" in capsys.readouterr().err
    assert resolved.profile.rl.init_from == ID
    load_checked(Console(), "profile.toml", [], {}, fetch=True)
    assert len(network) == 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_pattern_lets_a_pickle_in(pattern: str) -> None:
    from fnmatch import fnmatch

    names = ("pytorch_model.bin", "x.pt", "x.pth", "x.ckpt", "x.pkl", "x.pickle", "x.py", "x.h5", "x.msgpack")
    assert not any(fnmatch(name, pattern) for name in names)


def test_nothing_is_fetched_for_a_profile_with_other_faults_nor_by_validate_nor_offline(
    network: list[dict[str, Any]], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load({"rl.init_from": ID, "rl.scheduler_type": "euler"})
    with pytest.raises(ProfileRefused):
        load_checked(Console(), "profile.toml", [], {}, fetch=True)
    load({"rl.init_from": ID})
    with pytest.raises(ProfileRefused):
        load_checked(Console(), "profile.toml", [], {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ProfileRefused):
        load_checked(Console(), "profile.toml", [], {}, fetch=True)
    assert network == []


def test_a_download_that_fails_is_not_the_profile_s_fault(network: list[dict[str, Any]], load: Load) -> None:
    load({"rl.init_from": "some-org/other@main"})
    with pytest.raises(EnvironmentUnfit) as failed:
        load_checked(Console(), "profile.toml", [], {}, fetch=True)
    assert failed.value.message == "some-org/other at main cannot be downloaded: no route to the hub"
    assert failed.value.hint.startswith("try: hf download some-org/other --revision main")


# -- through the command --------------------------------------------------------------------------------------------


def test_the_command_reads_the_cache_of_hf_home_without_torch(hub: Path, load: Load, place: Path) -> None:
    snapshot = put_snapshot(hub, FIRST)
    load({"rl.init_from": ID})
    env = {"HF_HOME": str(hub.parent)}
    answer = nftctl("validate", "profile.toml", cwd=place, env=env)
    assert answer.returncode == 0, answer.stderr
    plan = the_object(nftctl("launch", "profile.toml", "--dry-run", "--json", cwd=place, env=env))["plan"]
    assert plan["base"] == {"path": str(snapshot), "fingerprint": fingerprint_base(snapshot)}
    refused = nftctl("launch", "profile.toml", cwd=place, env={"HF_HOME": str(place / "empty")})
    assert refused.returncode == 3
    assert "error[init-from-hub]" in refused.stderr
    assert "hf download some-org/some-base --revision main" in refused.stderr
    code = "import sys, json; from nftctl.cli.main import run; run(['validate', 'profile.toml'])\n"
    code += f"print(json.dumps(sorted(set(sys.modules) & set({HEAVY!r}))))"
    assert json.loads(python(code, cwd=place, env=env).stdout.splitlines()[-1]) == []
