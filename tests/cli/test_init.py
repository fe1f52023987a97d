"""`init`: a new profile that means what the bundled one means, and never a file lost."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from nftctl.cli.init import _write_new, starter
from nftctl.profile.load import Resolved, bundled_profiles, load_profile
from nftctl.profile.preflight import check

from .program import nftctl, the_object

COMMENTED = re.compile(r"^# (?=\w+ = |\[)", re.MULTILINE)


def load_starter(folder: Path, text: str) -> Resolved:
    path = folder / "mine.toml"
    path.write_text(text)
    return load_profile(path, env={})


@pytest.mark.parametrize("name", bundled_profiles())
def test_a_starter_lacks_what_its_base_lacks_and_nothing_else(tmp_path: Path, name: str) -> None:
    base = load_profile(bundled_profiles()[name], env={})
    mine = load_starter(tmp_path, starter(name, "mine.toml"))
    assert mine.profile == base.profile
    found = check(mine)
    assert {(f.key, f.code) for f in found} == {(f.key, f.code) for f in check(base)}
    # What is to be filled in is in the new file, not in the package.
    assert {f.origin for f in found} <= {str(tmp_path / "mine.toml")}
    assert all(f.line is not None for f in found)


@pytest.mark.parametrize("name", bundled_profiles())
def test_every_comment_shows_the_value_in_force(tmp_path: Path, name: str) -> None:
    text, count = COMMENTED.subn("", starter(name, "mine.toml"))
    mine = load_starter(tmp_path, text)
    assert mine.profile == load_profile(bundled_profiles()[name], env={}).profile
    own = [origin for origin in mine.origins.values() if origin.source == "profile"]
    assert len(own) >= count - 1  # one of the lines may be the head of the provider's table
    assert len(own) >= 25


def test_init_then_validate(tmp_path: Path) -> None:
    answer = nftctl("init", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "profile.toml\n")
    assert answer.stderr == "next: nftctl validate profile.toml && nftctl launch profile.toml\n"
    assert nftctl("validate", cwd=tmp_path).stdout.startswith("profile: valid")
    assert max(map(len, (tmp_path / "profile.toml").read_text().splitlines())) <= 120


def test_what_is_to_be_filled_in_is_said(tmp_path: Path) -> None:
    arguments = ("init", "mine.toml", "--from", "cosmos3_nft_t2i_public_4gpu", "--json")
    answer = nftctl(*arguments, cwd=tmp_path)
    document = the_object(answer)
    assert (document["path"], document["extends"]) == ("mine.toml", "cosmos3_nft_t2i_public_4gpu")
    assert set(document["fill_in"]) == {
        "rl.init_from", "model.vae", "data.prompt_file", "reward.providers.0.url", "reward.providers.0.revision",
    }  # fmt: skip
    assert "yours to fill in: " in answer.stderr
    refused = the_object(nftctl("validate", "mine.toml", "--json", cwd=tmp_path))
    assert {f["key"] for f in refused["diagnostics"]} == set(document["fill_in"])


def test_the_environment_does_not_leak_into_the_file(tmp_path: Path) -> None:
    nftctl("init", cwd=tmp_path, env={"NFTCTL_OPTIMIZER__LR": "0.5", "NFTCTL_PROFILE": "nowhere"})
    assert "# lr = 0.001\n" in (tmp_path / "profile.toml").read_text()


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "folder"])
def test_nothing_is_overwritten(tmp_path: Path, kind: str) -> None:
    target, other = tmp_path / "profile.toml", tmp_path / "other"
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to(other)
        if kind == "link":
            other.write_text("mine")
    answer = nftctl("init", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "\nhelp: " in answer.stderr
    if kind == "folder":
        assert list(target.iterdir()) == []
    else:
        assert "nftctl init profile-2.toml" in answer.stderr
        assert other.exists() == (kind == "link")
        assert kind == "dangling" or target.read_text() == "mine"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("mine", "nftctl init mine.toml"),
        ("my file", "nftctl init 'my file.toml'"),
        ("-", "ends in .toml"),
        (".", "nftctl init profile.toml"),
        ("no/where.toml", "No such file or directory"),
        ("x" * 300 + ".toml", "File name too long"),
    ],
)
def test_a_place_that_cannot_be(tmp_path: Path, path: str, said: str) -> None:
    answer = nftctl("init", path, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in answer.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["two words.toml", "line\nend = 1\n.toml", "grün.toml"])
def test_a_strange_name_stays_inside_its_comment(tmp_path: Path, name: str) -> None:
    assert nftctl("init", name, cwd=tmp_path).returncode == 0
    assert nftctl("validate", name, cwd=tmp_path).returncode == 0


def test_half_a_file_does_not_stay_where_the_disk_is_full(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # no file of this process may be longer
    try:
        with pytest.raises(OSError, match="too large"):
            _write_new(tmp_path / "p.toml", "x" * 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "p.toml").exists()
    _write_new(tmp_path / "p.toml", "x" * 20)
