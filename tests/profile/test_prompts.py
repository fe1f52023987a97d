"""Prompt files: what a row is, and which lines are refused by number."""

import json
from pathlib import Path

import pytest

from nftctl.errors import Finding, ProfileRefused
from nftctl.profile.prompts import Prompt, base_folder, read_prompts, read_rows, resolve_prompt_file


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(path: Path) -> list[Finding]:
    with pytest.raises(ProfileRefused) as caught:
        read_prompts(path)
    return caught.value.findings


@pytest.mark.parametrize(
    "content", ["a cat\n two dogs \na cat\n", "a cat\r\n two dogs \r\na cat", "a cat\n two dogs \na cat"]
)
def test_text_files(tmp_path: Path, content: str) -> None:
    # Equal prompts stay two rows, spaces are kept, and the last line needs no end.
    prompts = read_prompts(write(tmp_path, "p.txt", content))
    assert [p.text for p in prompts] == ["a cat", " two dogs ", "a cat"]
    assert all(p.reward_text == p.text and p.metadata == {} for p in prompts)


def test_a_structured_prompt_is_a_line_like_any_other(tmp_path: Path) -> None:
    line = '{"subject": "a prompt\u2028er"}'
    assert read_prompts(write(tmp_path, "p.txt", f"{line}\nplain\n")) == [Prompt(line, line), Prompt("plain", "plain")]


def test_json_lines(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a cat"},
        {"prompt": '{"subject": "a bus"}', "reward_prompt": "a bus", "metadata": {"n": [1, {"x": 0.5}]}},
        {"prompt": {"subject": "a bus"}, "reward_prompt": "a bus"},
        {"prompt": {"z": ["é", 1, 0.50, None, True], "a": {}}},
    ]
    path = write(tmp_path, "p.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert read_prompts(path) == [
        Prompt("a cat", "a cat"),
        Prompt('{"subject": "a bus"}', "a bus", {"n": [1, {"x": 0.5}]}),
        # An object is its JSON text: keys in the order of the file, separators with a blank, ASCII.
        Prompt('{"subject": "a bus"}', "a bus"),
        Prompt(*['{"z": ["\\u00e9", 1, 0.5, null, true], "a": {}}'] * 2),
    ]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("a cat", "not JSON"),
        ('{"prompt": "a"', "not JSON"),
        ('"a cat"', "not an object"),
        ('{"text": "a"}', '"text" is not one of'),
        ('{"reward_prompt": "a"}', 'no "prompt"'),
        ('{"prompt": ""}', '"prompt" must be a text'),
        ('{"prompt": {}}', "and not empty"),
        ('{"prompt": ["a"]}', "a text or, for a structured prompt, a JSON object"),
        ('{"prompt": {"subject": "a", "subject": "b"}}', "names a key twice"),
        ('{"prompt": {"subject": "a"}, "reward_prompt": {"subject": "a"}}', '"reward_prompt" must be a text'),
        ('{"prompt": null}', '"prompt" must be a text'),
        ('{"prompt": "a", "reward_prompt": 3}', '"reward_prompt" must be a text'),
        ('{"prompt": "a", "metadata": []}', '"metadata" must be an object'),
        ('{"prompt": "a", "prompt": "b"}', "names a key twice"),
        ('{"prompt": "a", "metadata": {"x": NaN}}', "must be a finite number"),
        ('{"prompt": "a", "metadata": {"x": 1e999}}', "must be a finite number"),
        ('{"prompt": "a", "metadata": {"x": 1' + "0" * 30 + "}}", "must fit in 64 bits"),
        ('{"prompt": "\\ud800"}', "must be valid Unicode text"),
        ('{"prompt": "a", "metadata": {"x": ' + "[" * 100_000 + "}}", "nested too deeply"),
    ],
)
def test_a_wrong_third_line_is_refused_by_its_number(tmp_path: Path, line: str, part: str) -> None:
    good = '{"prompt": "good"}'
    path = write(tmp_path, "p.jsonl", f"{good}\n{good}\n{line}\n{good}\n")
    (finding,) = refused(path)
    assert (finding.code, finding.origin, finding.line) == ("prompt-file-invalid", str(path), 3)
    assert part in finding.message


@pytest.mark.parametrize("line", ["", "\t", '{"prompt": "a cat"}'])
def test_wrong_lines_of_text_files(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "p.txt", f"a\nb\n{line}\nc\n")
    assert [f.line for f in refused(path)] == [3]


def test_empty_lines_are_one_finding_between_others_and_nothing_at_the_end(tmp_path: Path) -> None:
    for name, row in (("p.txt", "{}"), ("p.jsonl", '{{"prompt": "{}"}}')):
        a, b = row.format("a"), row.format("b")
        assert [p.text for p in read_prompts(write(tmp_path, name, f"{a}\n{b}\n\n \n\r\n\t"))] == ["a", "b"]
        (finding,) = refused(write(tmp_path, name, f"\n{a}\n \n\n{b}\n\n"))
        assert (finding.line, finding.message[:24]) == (1, "lines 1, 3, 4 are empty,")
    (finding,) = refused(write(tmp_path, "p.txt", "\n" * 30 + "a"))
    assert "20 and 10 more are empty" in finding.message


def test_rows_are_read_beside_wrong_lines(tmp_path: Path) -> None:
    rows, findings = read_rows(write(tmp_path, "p.jsonl", '{"prompt": "a"}\nx\n\n{"prompt": "b"}\n'))
    assert [(line, prompt.text) for line, prompt in rows] == [(1, "a"), (4, "b")]
    assert [finding.line for finding in findings] == [2, 3]


def test_all_wrong_lines_at_once_but_not_thousands(tmp_path: Path) -> None:
    assert [f.line for f in refused(write(tmp_path, "p.jsonl", '{"prompt": "a"}\nx\n{"prompt": "a"}\ny\n'))] == [2, 4]
    found = refused(write(tmp_path, "p.jsonl", "x\n" * 1000))
    assert len(found) == 21
    assert found[-1].message.startswith("980 more lines")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("p.txt", b"\xef\xbb\xbfa cat\n", 1),
        ("p.txt", "a cat\ncaf\xe9\n".encode("latin-1"), 2),
        ("p.txt", b"", None),
        ("p.txt", b"\n\n", None),
        ("p.csv", b"a cat\n", None),
        ("p", b"a cat\n", None),
    ],
)
def test_files_refused_as_a_whole(tmp_path: Path, name: str, content: bytes, line: int | None) -> None:
    (finding,) = refused(write(tmp_path, name, content))
    assert (finding.code, finding.line) == ("prompt-file-invalid", line)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert [f.code for f in refused(tmp_path / "nope.txt")] == ["prompt-file-missing"]
    (tmp_path / "folder.txt").mkdir()
    assert [f.code for f in refused(tmp_path / "folder.txt")] == ["prompt-file-invalid"]
    assert [f.code for f in refused(Path("a\0b.txt"))] == ["prompt-file-invalid"]


def test_embedded_names_lead_into_the_package() -> None:
    train, test = resolve_prompt_file("embedded", "train"), resolve_prompt_file("embedded", "test")
    assert (len(read_prompts(train)), len(read_prompts(test))) == (48, 12)
    assert not {p.text for p in read_prompts(train)} & {p.text for p in read_prompts(test)}
    assert (base_folder("embedded") / "transformer" / "config.json").is_file()


def test_other_names_are_paths() -> None:
    assert resolve_prompt_file("~/p.txt", "train") == Path("~/p.txt").expanduser()
    assert resolve_prompt_file("p.jsonl", "test") == Path("p.jsonl")
    assert base_folder("a/b") == Path("a/b")
