"""Broken profiles by the hundred: refused or accepted, never a traceback, never accepted with a key nobody knows."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nftctl.errors import ProfileRefused
from nftctl.profile.diagnose import format_finding
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.profile.preflight import check
from nftctl.profile.schema import Profile, Provider

TEXT = bundled_profiles()["tiny_t2i_cpu"].read_text()
LINES = TEXT.split("\n")
KEY_LINES = [n for n, line in enumerate(LINES) if "=" in line.split("#")[0]]


def tries(count: int) -> settings:
    """So many examples; loading takes as long as it takes on a busy machine, and each example writes its own file."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
VALUES = st.one_of(
    st.sampled_from(["true", "nan", "-inf", "0", "-1", "1e-4", "4.5", "[]", "{}", "[1, 2]", "2026-01-01", '""', "''"]),
    st.sampled_from(
        [
            '"\\u0000"',
            '"image"',
            '"embedded"',
            "1" * 30,
            "{a = 1}",
            "[[{}]]",
            '"a\\nb"',
            '"a/b.toml\\u001b"',
            '"' + "n" * 5000 + '"',
            '"~x"',
        ]
    ),
    st.integers().map(str),
    st.floats().map(repr),
    WORDS,
)


def outcome(path: Path, **options: object) -> Profile | None:
    """Load and check as `validate` does; the profile if nothing was wrong. Anything but a refusal is let through."""
    try:
        resolved = load_profile(path, **{"env": {}, **options})
        findings = check(resolved)
    except ProfileRefused as refused:
        resolved, findings = None, refused.findings
    assert findings or resolved
    for finding in findings:
        assert finding.code
        assert finding.message
        assert format_finding(finding).encode().count(b"\n") == (1 if finding.help else 0)
    wrong = any(finding.severity == "error" for finding in findings)
    return None if wrong or resolved is None else resolved.profile


def unknown_keys(document: dict[str, object]) -> list[str]:
    """An independent look: which keys of the document does the model's own dump not have?"""
    known = Profile().model_dump()

    def walk(table: dict[str, object], like: dict[str, object], above: str) -> list[str]:
        found = []
        for key, value in table.items():
            if key not in like:
                found.append(above + key)
            elif isinstance(value, dict) and isinstance(like[key], dict):
                found += walk(value, like[key], f"{above}{key}.")
            elif key == "providers" and isinstance(value, list):
                found += [n for entry in value for n in walk(entry, Provider(name="x").model_dump(), "providers.")]
        return found

    return walk({key: value for key, value in document.items() if key != "extends"}, known, "")


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The tiny profile after one to three accidents: a key dropped, renamed, retyped or doubled, bytes overwritten."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.sampled_from([n for n, line in enumerate(lines) if "=" in line.split("#")[0]]))
        key, value = lines[number].split("=", 1)
        match draw(st.sampled_from(["drop", "rename", "retype", "double", "move"])):
            case "drop":
                lines[number] = "#"
            case "rename":
                at = draw(st.integers(0, len(key.strip()) - 1))
                lines[number] = f"{key[:at]}{draw(st.sampled_from('abz_9'))}{key[at + 1 :]}={value}"
            case "retype":
                lines[number] = f"{key}= {draw(VALUES)}"
            case "double":
                lines.insert(draw(st.integers(0, len(lines))), lines[number])
            case "move":
                lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(number))
    content = bytearray("\n".join(lines).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 2))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


def refused_or_known(path: Path, content: bytes) -> None:
    """What every accident has to come to: a refusal with findings, or a profile of known keys."""
    path.write_bytes(content)
    if outcome(path) is not None:
        assert unknown_keys(tomllib.loads(content.decode())) == []


@tries(300)
@given(mutations())
def test_any_accident(tmp_path: Path, content: bytes) -> None:
    refused_or_known(tmp_path / "p.toml", content)


@pytest.mark.soak
@tries(2000)
@given(mutations())
def test_any_of_many_accidents(tmp_path: Path, content: bytes) -> None:
    refused_or_known(tmp_path / "p.toml", content)


def accepted_only_if_known(path: Path, text: str) -> None:
    path.write_bytes(text.encode())
    if outcome(path) is not None:
        assert unknown_keys(tomllib.loads(text)) == []


@tries(150)
@given(st.sampled_from(KEY_LINES), VALUES)
def test_any_value_at_any_key(tmp_path: Path, number: int, value: str) -> None:
    lines = list(LINES)
    lines[number] = f"{lines[number].split('=')[0]}= {value}"
    accepted_only_if_known(tmp_path / "p.toml", "\n".join(lines))


@tries(100)
@given(st.sampled_from(KEY_LINES), st.data())
def test_a_misspelt_key_is_never_accepted(tmp_path: Path, number: int, data: st.DataObject) -> None:
    key, rest = LINES[number].split("=", 1)
    name = key.strip()
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from(["", "x", "_", name[at] * 2]))
    wrong = name[:at] + letter + name[at + 1 :]
    lines = list(LINES)
    lines[number] = f"{wrong} ={rest}"
    path = tmp_path / "p.toml"
    path.write_text("\n".join(lines))
    if wrong in (name, ""):
        return
    with pytest.raises(ProfileRefused) as caught:
        load_profile(path, env={})
    found = [f for f in caught.value.findings if f.line == number + 1]
    assert [f.code for f in found] == ["unknown-key"]


@tries(150)
@given(st.integers(0, len(TEXT)), st.integers(0, 12), st.text(st.characters(codec="utf-8"), max_size=8))
@example(0, 0, "\ufeff")
@example(len(TEXT), 0, "[rl.old]\n")
def test_any_cut_and_any_insertion(tmp_path: Path, at: int, cut: int, insertion: str) -> None:
    accepted_only_if_known(tmp_path / "p.toml", TEXT[:at] + insertion + TEXT[at + cut :])


@tries(60)
@given(st.binary(max_size=60))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.toml").write_bytes(content)
    assert outcome(tmp_path / "p.toml") is None


KEYS = st.one_of(
    st.sampled_from(
        ["rl.beta", "rl", "rl.old", "grid.shapes", "grid.shapes.policy", "reward.providers", "extends", ""]
    ),
    st.sampled_from(
        ["reward.providers.0", "reward.providers.0.url", "reward.providers.1.name", "reward.providers.99.url"]
    ),
    st.lists(st.sampled_from(["rl", "reward", "providers", "0", "1", "²", "url", "lora", "model", ""]), max_size=5).map(
        ".".join
    ),
    WORDS,
)


@tries(150)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=3), st.lists(st.tuples(KEYS, VALUES), max_size=3))
def test_any_override(tmp_path: Path, sets: list[tuple[str, str]], env: list[tuple[str, str]]) -> None:
    variables = {f"NFTCTL_{key.upper().replace('.', '__')}": value for key, value in env}
    path = tmp_path / "p.toml"
    path.write_text(TEXT)
    outcome(path, sets=[f"{key}={value}" for key, value in sets], env=variables)
