"""From names and files to one resolved profile, with the origin of every value kept.

Layers, the lowest first: defaults, the files named by `extends`, the profile, the environment, `--set`, flags.
Refuses unknown keys everywhere, unreadable files and wrong types, and reports all of them at once. What the values
mean together is preflight's business.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nftctl.errors import Finding, ProfileRefused
from nftctl.profile.artifacts import EMBEDDED, EMBEDDED_SET, bundled_profiles
from nftctl.profile.diagnose import Places, arrange, printable, unknown_variable
from nftctl.profile.keys import locate, parse
from nftctl.profile.layers import Layers
from nftctl.profile.origins import Origin
from nftctl.profile.schema import Profile
from nftctl.profile.sources import PREFIX, SPECIAL, SourceRefused, TomlSource, VariableSource, parse_value
from nftctl.profile.t2i import T2I_PROFILES

__all__ = ["Origin", "Resolved", "bundled_profiles", "find_profile", "load_profile", "load_resolved"]

EMBEDDED_DEFAULT = "scenes_t2i_cpu"
RESOLVED_FILE = "profile.resolved.json"
STDIN = Path("/dev/stdin")

_FLAGS = {
    "job.name": "--name",
    "job.run_dir": "--run-dir",
    "rl.max_steps": "--steps",
    "reward.providers.0.url": "--url",
    "reward.providers.0.revision": "--revision",
    "reward.providers.0.protocol": "--protocol",
}


@dataclass(frozen=True)
class Resolved:
    """A profile in which every value is settled."""

    profile: Profile
    origins: dict[str, Origin]
    """Dotted key -> where its value came from; one entry per value, in the order of the schema, maps key by key."""
    name: str
    """Name of the bundled profile, or the file's stem."""
    path: Path | None
    """The file it came from; None for a run's own resolved profile."""
    text: str
    """The file, verbatim."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Every file that was read, the profile first: path as shown -> text. Lines are looked up in these."""


def find_profile(argument: str | None, env: Mapping[str, str], cwd: Path) -> tuple[Path, str]:
    """Which file a command means, and a sentence that says so.

    The argument, else $NFTCTL_PROFILE, else ./profile.toml, else the embedded default. Raises ProfileRefused for a
    bare name that no bundled profile has; whether a path leads to a file is for `load_profile` to say.
    """
    if argument is not None:
        return _named(argument, cwd, "as given")
    if env.get("NFTCTL_PROFILE"):
        return _named(env["NFTCTL_PROFILE"], cwd, "from $NFTCTL_PROFILE")
    if (cwd / "profile.toml").exists():
        return _beside(cwd, "profile.toml"), "using ./profile.toml, found in the working folder"
    why = f"using the embedded default {EMBEDDED_DEFAULT}: no PROFILE, no $NFTCTL_PROFILE, no ./profile.toml"
    return bundled_profiles()[EMBEDDED_DEFAULT], why


def _named(argument: str, cwd: Path, why: str) -> tuple[Path, str]:
    if argument == "-":
        return STDIN, "using the profile on standard input"
    bundled = bundled_profiles()
    if argument in bundled:
        return bundled[argument], f"using the bundled profile {argument}, {why}"
    path = _beside(cwd, argument)
    if _is_bare(argument) and (not argument or not os.path.lexists(path)):
        name = printable(argument)
        message = f'there is no bundled profile and no file named "{name}"'
        raise ProfileRefused([Finding("profile-missing", "", message, help=_bundled_like(argument), origin=name)])
    return path, f"using {path}, {why}"


def _is_bare(argument: str) -> bool:
    return os.sep not in argument and not argument.endswith(".toml") and "\0" not in argument


def _beside(folder: Path, name: str) -> Path:
    """`name` seen from `folder`; kept as written when that is the working folder, so that messages stay short."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - unlike Path.expanduser, leaves an unknown ~user alone
    return path if folder == Path.cwd() else folder / path


def load_profile(
    path: Path,
    *,
    sets: Sequence[str] = (),
    flags: Mapping[str, object] = {},
    env: Mapping[str, str] | None = None,
    base: Mapping[str, object] | None = None,
) -> Resolved:
    """Read a profile and everything that overrides it. Raises ProfileRefused with all findings.

    `sets` are `key=value` texts, `flags` map dotted keys to values (None: not given), `env` defaults to the process
    environment, `base` is a document that lies below every file.
    """
    layers = Layers()
    texts: dict[str, str] = {}
    if base is not None:
        layers.lay_document(base, Origin("base", "base"))
    for document, origin in reversed(_read_chain(path, layers, texts)):
        layers.lay_document(document, origin)
    _override(layers, sets, flags, os.environ if env is None else env)
    stem = "stdin" if path == STDIN else path.stem
    return _finish(layers, Resolved(Profile(), {}, stem, path, texts.get(str(path), ""), texts))


def load_resolved(
    document: Mapping[str, Any],
    *,
    name: str,
    text: str,
    sets: Sequence[str] = (),
    flags: Mapping[str, object] = {},
    env: Mapping[str, str] | None = None,
) -> Resolved:
    """The same for a run's own resolved profile, which stands where the file stood at launch."""
    layers = Layers()
    layers.lay_document(document, Origin("profile", RESOLVED_FILE))
    _override(layers, sets, flags, os.environ if env is None else env)
    return _finish(layers, Resolved(Profile(), {}, name, None, text))


def _finish(layers: Layers, draft: Resolved) -> Resolved:
    profile = layers.finish()
    if profile is None:
        places = Places(draft.texts)
        raise ProfileRefused(arrange(map(places.finding, layers.faults), [str(draft.path), *draft.texts]))
    return replace(draft, profile=_name_embedded(profile), origins=layers.origins())


def _name_embedded(profile: Profile) -> Profile:
    """The profile with a bare `embedded` said in full where its contract has another packaged set than the usual.

    A run's record then says by itself which base and prompts it had.
    """
    contract = T2I_PROFILES.get(profile.rl.profile)
    if contract is None or contract.embedded in ("", EMBEDDED_SET):
        return profile
    named = f"{EMBEDDED}:{contract.embedded}"
    rl, data, evaluation = profile.rl, profile.data, profile.eval
    if rl.init_from == EMBEDDED:
        rl = rl.model_copy(update={"init_from": named})
    if data.prompt_file == EMBEDDED:
        data = data.model_copy(update={"prompt_file": named})
    if evaluation.prompt_file == EMBEDDED:
        evaluation = evaluation.model_copy(update={"prompt_file": named})
    return profile.model_copy(update={"rl": rl, "data": data, "eval": evaluation})


def _read_chain(path: Path, layers: Layers, texts: dict[str, str]) -> list[tuple[dict[str, Any], Origin]]:
    """The profile, then what it extends, and so on; faults go to `layers`."""
    chain: list[tuple[dict[str, Any], Origin]] = []
    seen: set[Path] = set()
    below: Path | None = path
    while below is not None:
        origin = Origin("base" if chain else "profile", str(below))
        try:
            source = TomlSource(below)
        except SourceRefused as refusal:
            _refuse_source(layers, refusal, origin, chain[-1][1] if chain else None)
            break
        document = source()
        texts[str(below)] = source.text
        seen.add(below.resolve())
        chain.append((document, origin))
        below = _extended(document.pop("extends", None), below, layers, origin)
        if below is not None and os.path.lexists(below) and below.resolve() in seen:
            layers.refuse(origin, "extends-cycle", f"extends comes back to {below}", path=("extends",))
            break
    return chain


def _refuse_source(layers: Layers, refusal: SourceRefused, origin: Origin, parent: Origin | None) -> None:
    if parent is not None and refusal.line is None:
        message = f"extends {origin.text}: {refusal.message}"
        layers.refuse(parent, refusal.code, message, help=refusal.help, path=("extends",))
    else:
        origin = replace(origin, line=refusal.line, column=refusal.column)
        layers.refuse(origin, refusal.code, refusal.message, help=refusal.help)


def _extended(name: object, path: Path, layers: Layers, origin: Origin) -> Path | None:
    if name is None:
        return None
    if not isinstance(name, str) or not name or "\0" in name:
        message = "extends must be the name of a bundled profile, or a path relative to this file"
        layers.refuse(origin, "invalid-type", message, path=("extends",))
        return None
    bundled = bundled_profiles()
    if _is_bare(name) and name not in bundled:
        message = f'there is no bundled profile named "{name}"'
        layers.refuse(origin, "profile-missing", message, help=_bundled_like(name), path=("extends",))
        return None
    return bundled.get(name, (Path() if path == STDIN else path.parent) / name)


def _bundled_like(name: str) -> str:
    bundled = bundled_profiles()
    close = difflib.get_close_matches(name, bundled, n=1)
    return f"did you mean {close[0]}?" if close else f"bundled: {', '.join(bundled)}; a path ends in .toml"


def _override(layers: Layers, sets: Sequence[str], flags: Mapping[str, object], env: Mapping[str, str]) -> None:
    for name in sorted(env, key=_natural):
        if name.startswith(PREFIX) and name not in SPECIAL:
            _lay_variable(layers, name, env[name])
    for argument in sets:
        _lay_set(layers, argument)
    for key, value in flags.items():
        if value is not None:
            layers.lay_value(parse(key.split(".")), value, Origin("flag", _FLAGS.get(key, "command line")))


def _natural(name: str) -> str:
    """Entry 2 before entry 10, so that entries can be appended in order."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(8), name)


def _lay_variable(layers: Layers, name: str, text: str) -> None:
    origin = Origin("env", f"env {name}")
    found = VariableSource(name, text).value_at()
    path = parse(found[0]) if found else parse(name.removeprefix(PREFIX).lower().split("__"))
    place = locate(path)
    if found is None or place is None or name != name.upper():
        # The value is not repeated: a misspelt NFTCTL_REWARD_TOKEN holds a secret.
        message, help = unknown_variable(name, path, SPECIAL)
        layers.refuse(origin, "unknown-key", message, help=help, path=path)
        return
    value = found[1]
    layers.lay_value(path, parse_value(value, as_text=place.text) if isinstance(value, str) else value, origin)


def _lay_set(layers: Layers, argument: str) -> None:
    key, equals, text = argument.partition("=")
    origin = Origin("set", "--set", argument=argument)
    if not equals or not key.strip():
        layers.refuse(origin, "invalid-set", "an override is written key=value", help="for example --set rl.beta=0.5")
        return
    path = parse(key.strip().split("."))
    place = locate(path)
    layers.lay_value(path, parse_value(text.strip(), as_text=place is not None and place.text), origin)
