"""Prompt files: `.txt` with one prompt a line, or `.jsonl` with `prompt`, optional `reward_prompt` and `metadata`.

A structured prompt may stand in a `.jsonl` row as the object that it is; the model reads it as its JSON text.
Owns the way from a profile's words to files, and their strict reading: a line that is not of the declared format, an
empty one between others included, is refused by its number, since skipping it would renumber every later row. Empty
lines at the end are no rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nftctl.errors import Finding, ProfileRefused
from nftctl.profile.artifacts import base_place, embedded_set, local
from nftctl.profile.jsonable import unfit

MISSING, INVALID = "prompt-file-missing", "prompt-file-invalid"

_MOST_FINDINGS = 20  # of one file: the hundredth wrong line teaches nothing that the first did not


@dataclass(frozen=True, slots=True)
class Prompt:
    """One source row. Example: Prompt('{"subject": "a red bus"}', "a red bus", {"source": "ours"})."""

    text: str
    """What the model reads."""
    reward_text: str
    """What scorers read; the same unless the line says otherwise."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Sent along to scorers."""


def resolve_prompt_file(value: str, split: Literal["train", "test"]) -> Path:
    """The file that `data.prompt_file` (train) or `eval.prompt_file` (test) names."""
    packaged = embedded_set(value)
    return packaged / f"prompts_{split}.txt" if packaged is not None else local(value)


def base_folder(value: str) -> Path:
    """The folder that `rl.init_from` names."""
    return base_place(value)


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt in file order. Raises ProfileRefused with a finding for each wrong line, and one for empty ones."""
    rows, findings = read_rows(path)
    if findings:
        raise ProfileRefused(findings)
    return [prompt for _, prompt in rows]


def read_rows(path: Path) -> tuple[list[tuple[int, Prompt]], list[Finding]]:
    """The prompts with their line numbers, and what is wrong with the other lines.

    Raises ProfileRefused when nothing of the file can be read.
    """
    readers = {".txt": _text_line, ".jsonl": _json_line}
    if path.suffix not in readers:
        raise _refused(path, "a prompt file is .txt (one prompt a line) or .jsonl")
    rows: list[tuple[int, Prompt]] = []
    wrong: list[tuple[int, str]] = []
    empty: list[int] = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            empty.append(number)
            continue
        try:
            rows.append((number, readers[path.suffix](line)))
        except ValueError as error:
            wrong.append((number, str(error)))
    return rows, _findings(path, wrong, empty)


def _findings(path: Path, wrong: Sequence[tuple[int, str]], empty: Sequence[int]) -> list[Finding]:
    """A finding for each wrong line, up to a number, and one for all empty lines; by line."""
    told = [*wrong[:_MOST_FINDINGS], *([(empty[0], _empty(empty))] if empty else [])]
    found = [Finding(INVALID, "", text, origin=str(path), line=line, column=1) for line, text in sorted(told)]
    if len(wrong) > _MOST_FINDINGS:
        more = f"{len(wrong) - _MOST_FINDINGS} more lines are not of this format either"
        found.append(Finding(INVALID, "", more, origin=str(path)))
    return found


def _empty(lines: Sequence[int]) -> str:
    if len(lines) == 1:
        return "the line is empty, and every line between others is a row: remove it"
    named = ", ".join(map(str, lines[:_MOST_FINDINGS]))
    more = f" and {len(lines) - _MOST_FINDINGS} more" if len(lines) > _MOST_FINDINGS else ""
    return f"lines {named}{more} are empty, and every line between others is a row: remove them"


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts at even distances, so that a grid does not show one corner of the file."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _refused(path, f"there is no such file: {path.absolute()}", code=MISSING) from None
    except (OSError, ValueError) as error:
        raise _refused(path, f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data.startswith(b"\xef\xbb\xbf"):
        raise _refused(path, "the file starts with a byte order mark; save it as plain UTF-8", line=1)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refused(path, f"byte 0x{data[error.start]:02x} is not UTF-8", line=line) from None
    if not text.strip():
        raise _refused(path, "the file holds no prompts")
    # Not splitlines(): a prompt may hold U+2028 and its kin.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while not lines[-1].strip():
        lines.pop()
    return lines


def _refused(path: Path, message: str, *, code: str = INVALID, line: int | None = None) -> ProfileRefused:
    column = None if line is None else 1
    return ProfileRefused([Finding(code, "", message, origin=str(path), line=line, column=column)])


def _text_line(line: str) -> Prompt:
    # A Cosmos3 prompt may well be JSON; an object with a "prompt" in it is a row of the other format.
    if line.startswith("{") and '"prompt"' in line:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and "prompt" in row:
            raise ValueError("this is a row of a .jsonl file, and the file is named .txt")
    return Prompt(line, line)


def _json_line(line: str) -> Prompt:
    try:
        row = json.loads(line, object_pairs_hook=_unique)
        reason = unfit(row)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("the line is JSON, but not an object")
    if reason:
        raise ValueError(f"each value {reason}")
    unknown = sorted(set(row) - {"prompt", "reward_prompt", "metadata"})
    if unknown:
        raise ValueError(f"{json.dumps(unknown[0])} is not one of prompt, reward_prompt, metadata")
    if "prompt" not in row:
        raise ValueError('the row has no "prompt"')
    text = _prompt(row["prompt"])
    metadata = row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError('"metadata" must be an object')
    reward_text = row.get("reward_prompt", text)
    if not isinstance(reward_text, str) or not reward_text.strip():
        raise ValueError('"reward_prompt" must be a text that is not empty: scorers read a plain sentence')
    return Prompt(text, reward_text, metadata)


def _prompt(value: object) -> str:
    """A text as it is; an object as `json.dumps` writes it, which is how Cosmos3's pipeline is given such prompts."""
    if isinstance(value, dict) and value:
        return json.dumps(value)
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError('"prompt" must be a text or, for a structured prompt, a JSON object; and not empty')


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("the line names a key twice")
    return row
