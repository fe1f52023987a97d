"""`convert` as a person meets it: both directions, what it says, and what it refuses."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from nftctl.profile.artifacts import EMBEDDED_BASE
from tests.run.make import snapshot

from .program import nftctl, the_object


class Hostile:
    def __reduce__(self) -> object:
        return os.system, ("touch owned",)


def test_there_and_back(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED_BASE, tmp_path / "base")
    before = snapshot(tmp_path / "base")
    document = the_object(nftctl("convert", "base", "dcp", "--json", cwd=tmp_path))
    assert list(document) == [
        "schema_version", "command", "ok", "exit_code", "diagnostics", "path", "source", "to", "tensors", "bytes",
        "files", "left_out", "not_tensors",
    ]  # fmt: skip
    assert (document["to"], document["tensors"]) == ("dcp", 100)
    assert document["files"] == [
        "model-00001-of-00001.safetensors", "model.safetensors.index.json", "transformer/config.json"
    ]  # fmt: skip
    answer = nftctl("convert", "dcp", "again", "--like", "base", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "again\n")
    assert "100 tensors" in answer.stderr
    # As a base it is the same one: content, not files, is what counts.
    from nftctl.run.hashing import fingerprint_base

    assert fingerprint_base(tmp_path / "again") == fingerprint_base(tmp_path / "base")
    assert snapshot(tmp_path / "base") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "base", "dcp"]


def test_a_hostile_checkpoint_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/.metadata").write_bytes(pickle.dumps(Hostile()))
    answer = nftctl("convert", "foreign", "out", "--config", EMBEDDED_BASE / "transformer", cwd=tmp_path)
    assert answer.returncode == 5
    assert "it names posix.system, which no tensor needs" in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere", "out"), 2, "nowhere is not a folder"),
        (("base", "full"), 2, "full is there already and is not empty"),
        (("base", "out", "--strip-prefix", "a."), 2, "--config, --like and --strip-prefix are for DCP"),
        (("full", "out"), 5, "full is neither a diffusers folder nor a distributed checkpoint"),
        (("full", "out", "--like", "full"), 2, "--like full is no base"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_refused(tmp_path: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "base").symlink_to(EMBEDDED_BASE)
    answer = nftctl("convert", *arguments, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (code, "")
    assert message in answer.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "full"]


def test_a_prefix_that_no_name_has_is_one_sentence(tmp_path: Path) -> None:
    assert nftctl("convert", EMBEDDED_BASE, "dcp", cwd=tmp_path).returncode == 0
    answer = nftctl("convert", "dcp", "out", "--strip-prefix", "modle.", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    said = answer.stderr.splitlines()
    assert said[-2] == "error: --strip-prefix modle.: none of the 100 tensors in dcp has that prefix"
    assert said[-1].startswith("help: their names begin with embed_tokens., layers., ")
    assert not (tmp_path / "out").exists()


def test_a_profile_that_names_a_pickled_checkpoint_is_told_the_command(tmp_path: Path) -> None:
    (tmp_path / "my dcp").mkdir()
    (tmp_path / "my dcp/.metadata").write_bytes(pickle.dumps(Hostile()))
    answer = nftctl("validate", "--set", "rl.init_from=my dcp", cwd=tmp_path)
    assert answer.returncode == 3
    assert "error[init-from-dcp]" in answer.stderr
    assert "only nftctl convert has the reader in which nothing of it can run" in answer.stderr
    assert "help: nftctl convert 'my dcp' 'my dcp-diffusers' --like BASE, where BASE is the base" in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["my dcp"]


def test_what_was_written_is_a_base_that_validate_and_launch_take(tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(EMBEDDED_BASE)
    assert nftctl("convert", "base", "dcp", cwd=tmp_path).returncode == 0
    sets = ("--set", "rl.init_from=dcp")
    refused = nftctl("validate", "tiny_t2i_cpu", *sets, cwd=tmp_path)
    assert refused.returncode == 3
    assert "error[tokenizer-missing]" in refused.stderr
    assert "1 error in the profile" in refused.stderr
    sets = (*sets, "--set", "model.tokenizer=base/tokenizer")
    one, two = (
        the_object(nftctl("validate", "tiny_t2i_cpu", *more, "--json", cwd=tmp_path))["memory"] for more in ((), sets)
    )  # fmt: skip
    assert one == two
    plan = the_object(nftctl("launch", "tiny_t2i_cpu", "--dry-run", *sets, "--json", cwd=tmp_path))["plan"]
    from nftctl.run.hashing import fingerprint_denoiser

    assert plan["base"] == {"path": "dcp", "fingerprint": fingerprint_denoiser(EMBEDDED_BASE)}
