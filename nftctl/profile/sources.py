"""Where values come from: a TOML file, one environment variable, one `--set`. Each source is asked alone.

Built on pydantic-settings, minus its two silences: a file that is not there is an error here, and so is a variable
whose name matches nothing. Refuses byte order marks, other encodings than UTF-8 and files without a single key. Never
reads `.env`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from nftctl.profile.schema import Profile

PREFIX = "NFTCTL_"
SPECIAL = ("NFTCTL_PROFILE", "NFTCTL_DEBUG", "NFTCTL_REWARD_TOKEN")
"""Variables that are not keys of a profile."""

_PLACE_IN_MESSAGE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class SourceRefused(Exception):
    """A source that cannot be read at all; `line` and `column` are known for syntax errors."""

    def __init__(self, code: str, message: str, *, help: str = "", line: int | None = None, column: int | None = None):
        super().__init__(message)
        self.code, self.message, self.help, self.line, self.column = code, message, help, line, column


class Settings(Profile, BaseSettings):
    """The profile as pydantic-settings sees it; never instantiated, only walked by the sources."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        enable_decoding=False,
        strict=False,
        extra="forbid",
        defer_build=True,  # never built: a validator of the whole profile costs time at every start
    )


class TomlSource(TomlConfigSettingsSource):
    """One TOML file, read once; `text` is what was read. Raises SourceRefused."""

    text: str = ""

    def __init__(self, path: Path) -> None:
        # Absolute, because the base class takes the path `.` for "no file".
        super().__init__(Settings, toml_file=path.absolute())

    @staticmethod
    def _existing_files(files: Any) -> list[Any]:
        # The base class leaves out what is not a regular file; here a missing file must reach `_read_file` and fail.
        return [files]

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        self.text = read_text(file_path)
        document = parse_toml(self.text)
        if not document:
            raise SourceRefused(
                "profile-empty", "the file holds no keys", help="some keys have no default: see a bundled profile"
            )
        return document


class VariableSource(EnvSettingsSource):
    """One environment variable; the value stays text."""

    def __init__(self, name: str, value: str) -> None:
        self._variable = {name.lower(): value}
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._variable

    def value_at(self) -> tuple[list[str], Any] | None:
        """The names that lead to the value, and the value; None if the variable names no table of the profile."""
        here: Any = self()
        names: list[str] = []
        while isinstance(here, dict) and here:
            ((name, here),) = here.items()
            names.append(name)
        return (names, here) if names else None


def read_text(path: Path) -> str:
    """The whole file as text. Raises SourceRefused for everything that keeps it from being UTF-8 text."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SourceRefused("profile-missing", f"there is no such file: {path.absolute()}") from None
    except IsADirectoryError:
        raise SourceRefused("profile-folder", "this is a folder, not a file", help="give a .toml file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceRefused("profile-unreadable", f"the file cannot be read: {reason}") from None
    if data.startswith(b"\xef\xbb\xbf"):
        raise SourceRefused(
            "profile-encoding",
            "the file starts with a byte order mark",
            help="save it as plain UTF-8",
            line=1,
            column=1,
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise SourceRefused("profile-encoding", message, help="save it as UTF-8", line=line, column=column) from None


def parse_toml(text: str) -> dict[str, Any]:
    """TOML text -> document. Raises SourceRefused with line and column."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and what int() says to numbers of thousands of digits
        raise _syntax(str(error), text) from None
    except RecursionError:
        raise SourceRefused("syntax", "values are nested too deeply") from None


def _syntax(message: str, text: str) -> SourceRefused:
    place = _PLACE_IN_MESSAGE.search(message)
    if place is None:
        return SourceRefused("syntax", message)
    line, column = place.groups()
    lines = text.split("\n")
    message = message[: place.start()]
    message = message[:1].lower() + message[1:]
    return SourceRefused(
        "syntax", message, line=int(line or len(lines)), column=int(column or len(lines[-1].rstrip("\r")) + 1)
    )


def parse_value(text: str, *, as_text: bool = False) -> Any:
    """The right side of an override: a TOML value, else the words themselves.

    With `as_text`, only quotes are read as TOML, so that a name such as `2026` or `true` stays text.
    """
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = document.get("value")
    alone = len(document) == 1 and value is not None
    return value if alone and (isinstance(value, str) or not as_text) else text
