"""`nftctl profiles`: the bundled profiles by name, one of them as it is, or the JSON Schema that all of them follow.

Describes a profile by the first sentence of its opening comment, so that the file itself is the only source. Refuses
names that are not bundled: this command reads no file of the person's.
"""

from __future__ import annotations

import difflib
import json as json_text
import sys
from collections.abc import Iterable
from pathlib import Path

from nftctl.cli.console import Console, table
from nftctl.errors import UsageRefused


def list_profiles(*, json: bool) -> None:
    """Print name and description of every bundled profile."""
    from nftctl.profile.load import bundled_profiles

    console = Console(json=json)
    found = [{"name": name, "description": describe(path.read_text())} for name, path in bundled_profiles().items()]
    for line in table([(entry["name"], entry["description"]) for entry in found]):
        console.data(line)
    console.say("nftctl profiles NAME prints one; nftctl init --from NAME starts a profile of your own from it")
    console.result("profiles", profiles=found)


def print_profile(name: str, *, json: bool) -> None:
    """Print the TOML of one bundled profile as it is, but for the line that leads editors to the schema beside it.

    That place is the package's, and the text is read, or saved, somewhere else. Raises UsageRefused for any other name.
    """
    path = find_bundled(name)
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#:"))
    if not json:
        _write(text)
    profile = {"name": name, "description": describe(text), "path": str(path), "text": text}
    Console(json=json).result("profiles", profile=profile)


def print_schema(*, json: bool) -> None:
    """Print the JSON Schema of a profile; with `json` inside the usual object."""
    from nftctl.profile.reference import json_schema, json_schema_text

    if not json:
        _write(json_schema_text())
    Console(json=json).result("profiles", schema=json_schema())


def find_bundled(name: str) -> Path:
    """The file of a bundled profile. Raises UsageRefused with the nearest name."""
    from nftctl.profile.load import bundled_profiles

    bundled = bundled_profiles()
    if name not in bundled:
        close = difflib.get_close_matches(name, bundled, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"bundled: {', '.join(bundled)}"
        raise UsageRefused(f"there is no bundled profile named {json_text.dumps(name, ensure_ascii=False)}", hint=hint)
    return bundled[name]


def describe(text: str) -> str:
    """The first sentence of a profile's opening comment, on one line; `#:schema` is for editors and is passed over."""
    words = " ".join(_opening(text.splitlines()))
    sentence, stop, _ = words.partition(". ")
    return sentence + stop.strip()


def _opening(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        if line.startswith("#:"):
            continue
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()


def _write(text: str) -> None:
    """Text to stdout as it is, in UTF-8 whatever the locale."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(text)
    sys.stdout.flush()
