"""Layers of values, the lowest first, each value remembered together with where it came from.

Tables merge key by key. Everything else is one value and replaces what was below it: a list, an array of tables, a
free-form map. An override may still reach inside by name or index (`reward.providers.0.url`). Each layer is validated
as it is laid, so that a wrong value is reported even if a later layer covers it. Refuses unknown keys. Nothing is
raised: everything wrong is collected in `faults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from nftctl.profile.diagnose import expected, shown, unknown_key
from nftctl.profile.jsonable import unfit
from nftctl.profile.keys import Path, Place, dotted, fields, first_unknown, leaves, locate
from nftctl.profile.origins import DEFAULT, Fault, Origin
from nftctl.profile.schema import Profile


class Layers:
    """The merged values so far, the origin of each, and every fault met on the way."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._values: dict[Path, Any] = {}
        self._origins: dict[Path, Origin] = {}
        self._entries: dict[Path, int] = {}

    def lay_document(self, document: Mapping[str, Any], origin: Origin) -> None:
        """Lay a whole document over what is there."""
        self._lay(document, Place("table", Profile), (), origin)
        self._validate(final=False)

    def lay_value(self, path: Path, value: Any, origin: Origin) -> None:
        """Lay one value, be it a table, at `path`."""
        place = locate(path)
        if place is None:
            self._unknown(path, origin)
        elif self._reach(path, origin):
            self._lay(value, place, path, origin)
            self._validate(final=False)

    def refuse(self, origin: Origin, code: str, message: str, *, help: str = "", path: Path = ()) -> None:
        """Note a fault that no value of the schema belongs to."""
        self.faults.append(Fault(path, origin, code, message, help))

    def finish(self) -> Profile | None:
        """The profile, or None if anything at all was wrong."""
        profile = self._validate(final=True)
        return None if self.faults else profile

    def origins(self) -> dict[str, Origin]:
        """Dotted key -> origin for every value of the profile, in the order of the schema; maps key by key."""
        found: dict[str, Origin] = {}
        for path in leaves(entries=lambda array: self._entries.get(array, 0)):
            value, origin = self._values.get(path), self._origins.get(path, DEFAULT)
            if isinstance(value, dict) and value:
                found |= {dotted((*path, key)): self._origins.get((*path, key), origin) for key in value}
            else:
                found[dotted(path)] = origin
        return found

    def _lay(self, value: Any, place: Place, path: Path, origin: Origin) -> None:
        if place.kind == "table" and place.section is not None:
            if not isinstance(value, Mapping):
                self._wrong_kind(path, origin, "a table", value)
                return
            known = fields(place.section)
            for name, item in value.items():
                if name in known:
                    self._lay(item, known[name], (*path, name), origin)
                else:
                    self._unknown((*path, name), origin)
        elif place.kind == "tables":
            self._lay_array(value, place, path, origin)
        elif reason := unfit(value):
            self.refuse(origin, "invalid-value", f"{dotted(path)} {reason}, got {shown(value)}", path=path)
        else:
            self._lay_leaf(value, path, origin)

    def _lay_array(self, tables: Any, place: Place, path: Path, origin: Origin) -> None:
        if not isinstance(tables, list):
            self._wrong_kind(path, origin, f"an array of tables, [[{dotted(path)}]]", tables)
            return
        for old in [key for key in self._values if key[: len(path)] == path]:
            del self._values[old], self._origins[old]
        self._entries[path] = len(tables)
        self._origins[path] = origin
        for index, table in enumerate(tables):
            self._origins[*path, index] = origin  # whom to blame for a key that the entry lacks
            self._lay(table, Place("table", place.section), (*path, index), origin)

    def _lay_leaf(self, value: Any, path: Path, origin: Origin) -> None:
        above = locate(path[:-1])
        if above is not None and above.kind == "map":
            whole = self._values.get(path[:-1])
            self._values[path[:-1]] = {**(whole if isinstance(whole, dict) else {}), path[-1]: value}
            self._origins.setdefault(path[:-1], origin)
        else:
            self._values[path] = value
            for inside in [key for key in self._origins if key[:-1] == path]:
                del self._origins[inside]
        self._origins[path] = origin

    def _reach(self, path: Path, origin: Origin) -> bool:
        """Make room for an entry one past the end of an array; note a fault for one further away."""
        for at, step in enumerate(path):
            if not isinstance(step, int):
                continue
            array, count = path[:at], self._entries.get(path[:at], 0)
            if step > count:
                message = f"{dotted(array)} has {count} entr{'y' if count == 1 else 'ies'}, so {step} cannot be set"
                self.refuse(
                    origin, "invalid-value", message, help=f"the next one is {dotted(array)}.{count}", path=path
                )
                return False
            if step == count:
                self._entries[array] = count + 1
                self._origins[path[: at + 1]] = origin
        return True

    def _document(self) -> dict[str, Any]:
        """The flat values as the nested document that pydantic validates."""
        document: dict[str, Any] = {}
        for array, count in self._entries.items():
            _descend(document, array[:-1])[array[-1]] = [{} for _ in range(count)]
        for path, value in self._values.items():
            _descend(document, path[:-1])[path[-1]] = value
        return document

    def _validate(self, *, final: bool) -> Profile | None:
        try:
            return Profile.model_validate(self._document())
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                if final or detail["type"] != "missing":
                    self._invalid(detail["loc"], detail["type"], detail.get("ctx", {}), detail["input"])
            return None

    def _invalid(self, place: tuple[int | str, ...], kind: str, context: Mapping[str, Any], value: Any) -> None:
        path = next((place[:n] for n in range(len(place), 0, -1) if place[:n] in self._values), place)
        if kind == "missing":
            if any(old.path == path[:-1] for old in self.faults):
                return  # the entry is no table at all, which has been said
            origin = self._origins.get(path[:-1], DEFAULT)
            fault = Fault(path, origin, "missing-key", f"{dotted(path)} is required")
        else:
            code = "invalid-type" if kind.endswith("_type") or kind == "int_from_float" else "invalid-value"
            whole = self._values.get(path, value)
            words, help = expected(kind, context, value, inside=place != path)
            message = f"{dotted(path)} must be {words}, got {shown(whole)}"
            origin = next((o for n in (1, 0) if (o := self._origins.get(place[: len(path) + n]))), DEFAULT)
            fault = Fault(path, origin, code, message, help)
        if not any((old.path, old.origin) == (fault.path, fault.origin) for old in self.faults):
            self.faults.append(fault)

    def _unknown(self, path: Path, origin: Origin) -> None:
        path = first_unknown(path)
        message, help = unknown_key(path)
        fault = Fault(path, origin, "unknown-key", message, help)
        if fault not in self.faults:
            self.faults.append(fault)

    def _wrong_kind(self, path: Path, origin: Origin, expected: str, value: Any) -> None:
        self.refuse(origin, "invalid-type", f"{dotted(path)} must be {expected}, got {shown(value)}", path=path)


def _descend(document: dict[str, Any], path: Path) -> Any:
    here: Any = document
    for step in path:
        here = here[step] if isinstance(step, int) else here.setdefault(step, {})
    return here
