"""`profiles`: the list, one file byte for byte, the schema; and a profile through standard input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nftctl.cli.profiles import describe
from nftctl.profile.load import bundled_profiles

from .program import ROOT, nftctl, the_object


def test_every_bundled_profile_is_listed_with_a_sentence(tmp_path: Path) -> None:
    answer = nftctl("profiles", cwd=tmp_path)
    assert answer.returncode == 0
    names = [line.split()[0] for line in answer.stdout.splitlines()]
    assert names == sorted(path.stem for path in (ROOT / "profiles").glob("*.toml"))
    four = answer.stdout.splitlines()[names.index("cosmos3_nft_t2i_public_4gpu")]
    assert four.endswith("  The public recipe on four GPUs.")
    listed = the_object(nftctl("profiles", "--json", cwd=tmp_path))["profiles"]
    assert [entry["name"] for entry in listed] == names
    assert all(entry["description"].endswith(".") and "\n" not in entry["description"] for entry in listed)


@pytest.mark.parametrize("name", bundled_profiles())
def test_a_profile_is_printed_byte_for_byte_but_for_a_place_that_is_not_there(tmp_path: Path, name: str) -> None:
    mark, _, text = (ROOT / "profiles" / f"{name}.toml").read_text().partition("\n")
    assert mark.startswith("#:schema ../")
    # An ASCII locale must not change a byte either.
    assert nftctl("profiles", name, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"}).stdout == text


def test_a_profile_as_json(tmp_path: Path) -> None:
    profile = the_object(nftctl("profiles", "tiny_t2i_cpu", "--json", cwd=tmp_path))["profile"]
    path = bundled_profiles()["tiny_t2i_cpu"]
    text = path.read_text().partition("\n")[2]
    assert (profile["name"], profile["text"], profile["path"]) == ("tiny_t2i_cpu", text, str(path))


@pytest.mark.parametrize("name", bundled_profiles())
def test_a_profile_s_first_line_leads_editors_to_the_schema(name: str) -> None:
    path = ROOT / "profiles" / f"{name}.toml"
    mark, _, target = path.read_text().splitlines()[0].partition(" ")
    assert mark == "#:schema"
    assert (path.parent / target).resolve() == ROOT / "docs" / "profile.schema.json"


def test_the_schema_is_printed_as_it_is_shipped(tmp_path: Path) -> None:
    shipped = (ROOT / "docs" / "profile.schema.json").read_text()
    assert nftctl("profiles", "--schema", cwd=tmp_path).stdout == shipped
    assert the_object(nftctl("profiles", "--schema", "--json", cwd=tmp_path))["schema"] == json.loads(shipped)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("profiles", "tiny"), "did you mean tiny_t2i_cpu?"),
        (("profiles", "../pyproject"), "bundled: cosmos3_nft_t2i_public"),
        (("profiles", "--schema", "tiny_t2i_cpu"), "takes no NAME"),
        (("init", "--from", "tiny_t2i_gpu"), "did you mean tiny_t2i_cpu?"),
    ],
)
def test_other_names_are_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    answer = nftctl(*arguments, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in answer.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One. Two.\nx = 1\n", "One."),
        ("#:schema ../s.json\n# A sentence\n# over v1.5 lines. More.\n", "A sentence over v1.5 lines."),
        ("#:schema s.json\n#No full stop\n\n# Another comment.\n", "No full stop"),
        ("x = 1\n# Too late.\n", ""),
    ],
)
def test_the_description_is_the_first_sentence(text: str, expected: str) -> None:
    assert describe(text) == expected


def test_a_listed_profile_goes_through_standard_input(tmp_path: Path) -> None:
    text = nftctl("profiles", "tiny_t2i_cpu", cwd=tmp_path).stdout
    assert nftctl("validate", "-", cwd=tmp_path, stdin=text).stdout.startswith("stdin: valid")
    plan = the_object(nftctl("launch", "-", "--dry-run", "--name", "x", "--json", cwd=tmp_path, stdin=text))["plan"]
    named = the_object(nftctl("launch", "tiny_t2i_cpu", "--dry-run", "--name", "x", "--json", cwd=tmp_path))["plan"]
    assert plan["identity"] == named["identity"]
    assert (plan["profile"], named["profile"]) == ("stdin", "tiny_t2i_cpu")
    refused = nftctl("launch", "-", cwd=tmp_path, stdin=text + "[rl.ref]\nupdate_every = 1\n")
    line = len(text.splitlines()) + 2
    assert refused.returncode == 3
    assert f"/dev/stdin:{line}:1: error[reference-not-frozen]" in refused.stderr
    assert list(tmp_path.iterdir()) == []
