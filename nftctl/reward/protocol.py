"""`nftctl-reward/1` as bytes and values: what a request and a reply are, checked the same way on both sides.

Owns the strictness of the protocol. Scores are matched by id; a missing, repeated or unknown id, a value that is not a
finite number, an `error` field or another revision ends in an exception that names the item, never in a score.
Unknown fields of a reply are ignored (a service may say more); unknown fields of a request are refused (it would be
scored without them). Knows no HTTP.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from nftctl.errors import RewardFailed
from nftctl.reward.images import JPEG_QUALITY, BadImage, Encoding, Image, decode_image, encode_image, side_by_side

PROTOCOL = "nftctl-reward/1"
MAX_KEY = 200


class RevisionDiffers(RewardFailed):
    """The service declares or answers with another revision than the pinned one: no failure policy may absorb this."""


class RequestRefused(RewardFailed):
    """A request that the service will not score: HTTP status, stable code, and a sentence for the person."""

    def __init__(self, status: int, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What `GET /v1/info` declares. `max_items` bounds the images of one request."""

    name: str
    revision: str
    modalities: tuple[str, ...]
    components: tuple[str, ...]
    max_items: int


@dataclass(frozen=True, slots=True)
class Item:
    """One image to score: id unique in its request, the plain prompt, uint8 [H, W, 3].

    Example: Item(id="17/2", prompt="a red 7", metadata={"digit": 7}, image=pixels)
    """

    id: str
    prompt: str
    metadata: Mapping[str, Any]
    image: Image


@dataclass(frozen=True, slots=True)
class Score:
    """The finite score of one item, and its named parts."""

    id: str
    score: float
    components: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed score request, images decoded."""

    request_id: str
    revision: str
    items: list[Item]


# ---------------------------------------------------------------------------------------------- requests


def check_key(key: str) -> str:
    """The idempotency key itself, if it can travel in a header: printable ASCII, 1 to 200 characters."""
    if not 0 < len(key) <= MAX_KEY or not all("!" <= c <= "~" for c in key):
        raise RewardFailed(f"an idempotency key is 1 to {MAX_KEY} printable ASCII characters without spaces")
    return key


def encode_request(
    key: str, revision: str, items: Sequence[Item], encoding: Encoding = "png", quality: int = JPEG_QUALITY
) -> bytes:
    """Body of `POST /v1/score`; equal arguments give equal bytes, as a repeated key requires. Raises RewardFailed."""
    _refuse_repeated([item.id for item in items])
    pixels = sum(item.image.size for item in items) // 3
    entries = side_by_side(lambda item: _item_out(item, encoding, quality), items, pixels)
    return orjson.dumps({"request_id": check_key(key), "revision": revision, "items": entries})


def parse_request(body: bytes, *, max_items: int) -> Request:
    """The request in `body` with its images decoded, or RequestRefused (400, or 413 for too many items)."""
    try:
        return _request_in(body, max_items)
    except RequestRefused:
        raise
    except RewardFailed as error:
        raise RequestRefused(400, "bad-request", error.message) from None


def _request_in(body: bytes, max_items: int) -> Request:
    where = "the request"
    document = load_object(body, where)
    _refuse_loose(document, where)
    _only(document, {"request_id", "revision", "items"}, where)
    key = check_key(_text(document, "request_id", where))
    revision = _text(document, "revision", where)
    entries = _list(document, "items", where)
    if not entries:
        raise RewardFailed("the request holds no items")
    if len(entries) > max_items:
        text = f"{len(entries)} items in one request; this service takes at most {max_items}"
        raise RequestRefused(413, "too-many-items", text)
    # As many bytes on the wire are about as many pixels.
    items = side_by_side(lambda numbered: _item_in(numbered[1], numbered[0]), list(enumerate(entries)), len(body))
    _refuse_repeated([item.id for item in items])
    return Request(key, revision, items)


def _item_out(item: Item, encoding: Encoding, quality: int) -> dict[str, object]:
    try:
        data = encode_image(item.image, encoding, quality)
        # Packed one by one, so that metadata that JSON cannot hold is blamed on its item; NaN would become null.
        _refuse_non_finite(item.metadata)
        orjson.dumps([item.id, item.prompt, dict(item.metadata)])
    except (BadImage, TypeError, ValueError, RecursionError) as error:
        raise RewardFailed(f"item {item.id!r} cannot be sent: {error}") from None
    height, width = item.image.shape[:2]
    image = {"encoding": encoding, "width": width, "height": height, "data": data}
    return {"id": item.id, "prompt": item.prompt, "metadata": dict(item.metadata), "image": image}


def _item_in(entry: object, n: int) -> Item:
    where = f"item {n}"
    entry = _object(entry, where)
    _only(entry, {"id", "prompt", "metadata", "image"}, where)
    where = f"item {_text(entry, 'id', where)!r}"
    image = _object(entry.get("image"), f"the image of {where}")
    _only(image, {"encoding", "width", "height", "data"}, f"the image of {where}")
    encoding, data = (_text(image, key, f"the image of {where}") for key in ("encoding", "data"))
    width, height = (_count(image, key, f"the image of {where}") for key in ("width", "height"))
    try:
        pixels = decode_image(encoding, width, height, data)
    except BadImage as error:
        raise RewardFailed(f"the image of {where}: {error}") from None
    metadata = _object(entry.get("metadata", {}), f"the metadata of {where}")
    return Item(entry["id"], _text(entry, "prompt", where, empty=True), metadata, pixels)


# ---------------------------------------------------------------------------------------------- replies


def encode_reply(revision: str, scores: Sequence[Score]) -> bytes:
    """Body of a good answer. Raises RewardFailed for a number that is not finite: it must never be sent."""
    out = []
    for score in scores:
        value = finite(score.score, f"the score of item {score.id!r}")
        parts = {k: finite(v, f"component {k!r} of item {score.id!r}") for k, v in score.components.items()}
        out.append({"id": score.id, "score": value, "components": parts})
    return orjson.dumps({"revision": revision, "scores": out})


def parse_reply(body: bytes, ids: Sequence[str], revision: str) -> list[Score]:
    """The scores of `ids`, in that order. Raises RevisionDiffers, or RewardFailed naming the item at fault."""
    document = load_object(body, "the reply")
    refuse_error_field(document, "the reply")
    check_revision(_text(document, "revision", "the reply"), revision, "the reply")
    entries = _list(document, "scores", "the reply")
    found: dict[str, Score] = {}
    for n, entry in enumerate(entries):
        score = _score_in(entry, n)
        if score.id in found:
            raise RewardFailed(f"item {score.id!r} was scored twice in one reply")
        found[score.id] = score
    sent = set(ids)
    unknown = [i for i in found if i not in sent]
    missing = [i for i in ids if i not in found]
    counts = f"{len(entries)} scores for {len(ids)} images"
    if unknown:
        raise RewardFailed(f"{counts}: item {unknown[0]!r} was scored but never sent")
    if missing:
        raise RewardFailed(f"{counts}: item {missing[0]!r} has no score")
    _refuse_loose(document, "the reply")
    return [found[i] for i in ids]


def _score_in(entry: object, n: int) -> Score:
    entry = _object(entry, f"score {n}")
    where = f"item {_text(entry, 'id', f'score {n}')!r}"
    refuse_error_field(entry, f"the score of {where}")
    if "score" not in entry:
        raise RewardFailed(f"the reply has no score for {where}")
    value = finite(entry["score"], f"the score of {where}")
    components = _object(entry.get("components", {}), f"the components of {where}")
    return Score(entry["id"], value, {k: finite(v, f"component {k!r} of {where}") for k, v in components.items()})


def encode_info(info: ServiceInfo) -> bytes:
    """Body of `GET /v1/info`."""
    return orjson.dumps(
        {"protocol": PROTOCOL, "name": info.name, "revision": info.revision, "modalities": info.modalities,
         "components": info.components, "max_items": info.max_items}
    )  # fmt: skip


def parse_info(body: bytes) -> ServiceInfo:
    """What the service declares, or RewardFailed; the caller compares the revision."""
    document = load_object(body, "the service's info")
    refuse_error_field(document, "the service's info")
    where = "the service's info"
    protocol = _text(document, "protocol", where)
    if protocol != PROTOCOL:
        raise RewardFailed(f"the service speaks {protocol!r}, not {PROTOCOL!r}")
    modalities, components = (_texts(document, key, where) for key in ("modalities", "components"))
    if "image" not in modalities:
        raise RewardFailed(f"the service scores {', '.join(modalities) or 'nothing'}, not images")
    _refuse_loose(document, where)
    name, revision = _text(document, "name", where), _text(document, "revision", where)
    return ServiceInfo(name, revision, modalities, components, _count(document, "max_items", where))


def encode_error(code: str, message: str) -> bytes:
    """Body of every answer that is not 200."""
    return orjson.dumps({"error": {"code": code, "message": message}})


def parse_error(body: bytes) -> str:
    """`code: message` of an error body, or "" when the body is something else. Never raises."""
    try:
        error = orjson.loads(body)["error"]
        return f"{error['code']}: {error['message']}"
    except (orjson.JSONDecodeError, TypeError, KeyError, IndexError):
        return ""


def check_revision(served: str, pinned: str, where: str) -> None:
    """Raise RevisionDiffers unless both are the same text."""
    if served != pinned:
        raise RevisionDiffers(
            f"{where} has revision {served!r}, the profile pins {pinned!r}",
            hint="start the pinned revision of the service, or pin the new one and start a new run",
        )


def finite(value: object, where: str) -> float:
    """`value` as a float if it is a finite number; text, null, booleans, NaN and infinities raise RewardFailed."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RewardFailed(f"{where} is {shown(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailed(f"{where} is {number}, not a finite number")
    return number


# ---------------------------------------------------------------------------------------------- JSON


class _Loose(dict[str, Any]):
    """A document that only a lenient parser accepts, kept so that the item with the NaN can be named."""


def load_object(body: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `body`; RewardFailed when it is none. NaN and Infinity are read, for `finite` to refuse."""
    try:
        return _object(orjson.loads(body), where)
    except orjson.JSONDecodeError as error:
        strict = error
    try:
        # Many writers emit NaN and Infinity: read them, so that validation can say which item it was.
        return _Loose(_object(json.loads(body), where))
    except (ValueError, RecursionError):
        start = body[:60].decode("utf-8", "replace")
        raise RewardFailed(f"{where} is not JSON ({strict}); it begins with {start!r}") from None


def _refuse_loose(document: dict[str, Any], where: str) -> None:
    if isinstance(document, _Loose):
        raise RewardFailed(f"{where} is not strict JSON: it holds NaN, Infinity or a number too large")


def refuse_error_field(document: Mapping[str, object], where: str) -> None:
    """Raise RewardFailed when a reply says that it is none."""
    if "error" in document:
        raise RewardFailed(f"{where} holds an error: {shown(document['error'])}")


def _refuse_non_finite(value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"metadata holds {value}, which JSON has no word for")
    children: Collection[object] = ()
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = value
    for child in children:
        _refuse_non_finite(child)


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RewardFailed(f"{where} is {shown(value)}, not an object")
    return value


def _only(document: Mapping[str, object], known: set[str], where: str) -> None:
    unknown = sorted(set(document) - known)
    if unknown:
        raise RewardFailed(f"{where} has the unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _text(document: Mapping[str, object], key: str, where: str, *, empty: bool = False) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise RewardFailed(f"{key} of {where} is {shown(value)}, not a text")
    return value


def _list(document: Mapping[str, object], key: str, where: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise RewardFailed(f"{key} of {where} is {shown(value)}, not a list")
    return value


def _texts(document: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    values = _list(document, key, where)
    if not all(isinstance(v, str) and v for v in values):
        raise RewardFailed(f"{key} of {where} is {shown(values)}, not a list of texts")
    return tuple(values)


def _count(document: Mapping[str, object], key: str, where: str) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RewardFailed(f"{key} of {where} is {shown(value)}, not a whole number of at least 1")
    return value


def _refuse_repeated(ids: Sequence[str]) -> None:
    seen: set[str] = set()
    for i in ids:
        if i in seen:
            raise RewardFailed(f"item {i!r} is in the request twice")
        seen.add(i)


def shown(value: object, limit: int = 120) -> str:
    """A value as JSON would show it, short enough for a message."""
    names = {True: "true", False: "false"}
    text = "null" if value is None else names[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
