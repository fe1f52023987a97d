"""A resolved profile as one TOML text that means the same on another machine.

Owns the writing of TOML: every key that is not a default, with whatever the command line, the environment and the
profiles below it gave; nothing has to travel beside it. Every line is printable, so the text can stand in a script or
in YAML as it is. Paths are left as they are: `paths_of` lists them. Owns also the lines of shell that keep a cluster's
own variables out of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nftctl.profile.artifacts import embedded_set, hub_id
from nftctl.profile.diagnose import printable
from nftctl.profile.keys import Path, dotted, locate
from nftctl.profile.load import Resolved

PATH_KEYS = ("rl.init_from", "model.vae", "model.tokenizer", "data.prompt_file", "eval.prompt_file", "job.run_dir")
"""Keys whose values name files or folders."""
KEPT = ("NFTCTL_REWARD_TOKEN", "NFTCTL_DEBUG")
"""Variables that no profile's value comes from."""


def profile_text(resolved: Resolved) -> str:
    """The profile as TOML; `load_profile` makes an equal one of it where no variable or flag interferes."""
    given = {key for key, origin in resolved.origins.items() if origin.source != "default"}
    name = printable(resolved.name)
    lines = [f"# The profile {name} with all that was set beside it: every key that is not a default."]
    lines += _table(resolved.profile.model_dump(), (), given)
    return "\n".join(lines) + "\n"


def paths_of(resolved: Resolved) -> dict[str, str]:
    """Dotted key -> path, for every value that names a file or folder outside of the package and of the hub."""
    dump = resolved.profile.model_dump()
    found = {key: str(dump[key.partition(".")[0]][key.partition(".")[2]]) for key in PATH_KEYS}
    return {key: value for key, value in found.items() if value and not embedded_set(value) and not hub_id(value)}


def token_variables(resolved: Resolved) -> list[str]:
    """The environment variables that hold bearer tokens of the services the run asks, each once."""
    providers = [*resolved.profile.reward.providers, *resolved.profile.eval.providers]
    return sorted({provider.token_env for provider in providers if provider.kind == "http"})


def without_settings(tokens: Sequence[str]) -> str:
    """Lines for any POSIX shell that unset every NFTCTL_ variable but those that hold `tokens`.

    A name that no shell can unset is left, and launch refuses it.
    """
    kept = dict.fromkeys([*KEPT, *(name for name in tokens if re.fullmatch(r"NFTCTL_[A-Za-z0-9_]+", name))])
    return "\n".join(
        [
            "# All that NFTCTL_ variables said is in the profile; those of this place must not change it. Tokens stay.",
            r"for name in $(env | sed -n 's/^\(NFTCTL_[A-Za-z0-9_]*\)=.*/\1/p'); do",
            f'    case $name in {" | ".join(kept)}) ;; *) unset "$name" ;; esac',
            "done",
        ]
    )


def _table(values: Mapping[str, Any], path: Path, given: set[str]) -> Iterator[str]:
    """A table's own keys, then the tables below it; TOML wants them in this order."""
    present = {name: value for name, value in values.items() if value is not None and _is_given((*path, name), given)}
    below = {name for name, value in present.items() if _is_tables(value) or _is_section(value, (*path, name))}
    own = [f"{_key(name)} = {_value(value)}" for name, value in present.items() if name not in below]
    if own and path:
        yield from ("", f"[{dotted(path)}]")
    yield from own
    for name in present:
        if name in below and _is_tables(present[name]):
            for index, entry in enumerate(present[name]):
                yield from _entry(entry, (*path, name), index, given)
        elif name in below:
            yield from _table(present[name], (*path, name), given)


def _entry(values: Mapping[str, Any], path: Path, index: int, given: set[str]) -> Iterator[str]:
    yield from ("", f"[[{dotted(path)}]]")
    for name, value in values.items():
        if value is not None and _is_given((*path, index, name), given):
            yield f"{_key(name)} = {_value(value)}"


def _is_given(path: Path, given: set[str]) -> bool:
    name = dotted(path)
    return name in given or any(key.startswith(f"{name}.") for key in given)


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _is_section(value: object, path: Path) -> bool:
    place = locate(path)
    return isinstance(value, dict) and place is not None and place.kind == "table"


def _key(name: str) -> str:
    return dotted((name,)) if dotted((name,)) == name else _text(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(name)} = {_value(item)}' for name, item in value.items())} }}"
    return repr(value)


def _text(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
