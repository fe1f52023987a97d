"""The wire format of the `cosmos-rl` reward service as bytes and values, both sides, images only.

Owns what a task, a ticket, a poll and a result are: enqueue carries JSON, one newline and a `.npy` array; pull carries
form fields and brings one list of scores per key. Refuses arrays that are not uint8 [B, H, W, 3], that hold objects or
that are longer or shorter than declared, and results whose asked-for keys are missing or not finite numbers. Knows no
HTTP. The format has no revision, no item ids and no limit on items.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode

import numpy as np
import numpy.typing as npt
import orjson

from nftctl.errors import RewardFailed
from nftctl.reward.images import MAX_PIXELS, Image
from nftctl.reward.protocol import RequestRefused, finite, load_object, refuse_error_field, shown

PROTOCOL = "cosmos-rl"

PING_PATH = "/api/reward/ping"
ENQUEUE_PATH = "/api/reward/enqueue"
PULL_PATH = "/api/reward/pull"
ENQUEUE_TYPE = "application/octet-stream"
FORM_TYPE = "application/x-www-form-urlencoded"
REPLICA_HEADER = "X-Lepton-Replica-Target"
"""Sent with a pull when the ticket named a replica: the scores may be known only there."""

PING_REPLY = b'{"message":"Ping request received"}'
NOT_READY = 400
"""Status of a pull whose scores are not there: not yet, not any more, or never asked for."""
NOT_READY_REPLY = b'{"message":"Not found scores"}'
DEFAULT_TYPE = "dance_grpo"
"""What a pull without a type asks for."""

_KNOWN = frozenset({"prompts", "reward_fn", "media_type", "video_infos"})
_HEADER_LIMIT = 4096
"""More than any honest `.npy` header of four axes; the rest of the body is the array."""

Batch = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Task:
    """What enqueue asks for: prompts [B], images uint8 [B, H, W, 3], reward functions by name with their weights.

    `extras` are the fields that single reward functions take, such as `geneval_tags` with one entry per image.
    """

    prompts: list[str]
    images: Batch
    reward_fn: dict[str, float]
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def wanted(self) -> list[str]:
        """The reward functions to run: those whose weight is above zero. Scores are never weighted by the service."""
        return [name for name, weight in self.reward_fn.items() if weight > 0]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What enqueue answers: by which name the scores can be pulled, and from which replica, if that matters."""

    uuid: str
    replica_id: str = ""


# ---------------------------------------------------------------------------------------------- enqueue


def encode_task(task: Task) -> bytes:
    """Body of an enqueue. Raises RewardFailed for what cannot be sent."""
    _check_batch(task.images.dtype, task.images.shape)
    head = {**task.extras, "prompts": task.prompts, "reward_fn": task.reward_fn, "media_type": "image"}
    out = io.BytesIO()
    try:
        out.write(orjson.dumps(head) + b"\n")
    except (TypeError, ValueError) as error:
        raise RewardFailed(f"a task cannot be sent: {error}") from None
    np.save(out, np.ascontiguousarray(task.images), allow_pickle=False)
    return out.getvalue()


def parse_task(body: bytes, *, max_items: int) -> Task:
    """The task in `body`, or RequestRefused (400; 413 for more than `max_items` images)."""
    try:
        return _task_in(body, max_items)
    except RequestRefused:
        raise
    except RewardFailed as error:
        raise RequestRefused(400, "bad-request", error.message) from None


def _task_in(body: bytes, max_items: int) -> Task:
    head, newline, blob = body.partition(b"\n")
    if not newline:
        raise RewardFailed("a task is JSON, one newline and an array; there is no newline")
    document = load_object(head, "the task")
    media = document.get("media_type", "video")
    if media != "image":
        raise RewardFailed(f"media_type is {shown(media)}; this service scores image only")
    prompts, weights = document.get("prompts"), document.get("reward_fn")
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise RewardFailed(f"prompts is {shown(prompts)}, not a list of texts")
    if not isinstance(weights, dict) or not weights:
        raise RewardFailed(f"reward_fn is {shown(weights)}, not an object of names and weights")
    reward_fn = {name: finite(weight, f"the weight of {name!r}") for name, weight in weights.items()}
    if len(prompts) > max_items:
        text = f"{len(prompts)} images in one task; this service takes at most {max_items}"
        raise RequestRefused(413, "too-many-items", text)
    images = decode_batch(blob)
    if len(images) != len(prompts):
        raise RewardFailed(f"{len(images)} images for {len(prompts)} prompts")
    return Task(prompts, images, reward_fn, {k: v for k, v in document.items() if k not in _KNOWN})


def batch_of(images: Sequence[Image]) -> Batch:
    """uint8 [B, H, W, 3] of images that are all of one size; RewardFailed when they are not."""
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        raise RewardFailed(f"{PROTOCOL} sends one array, and the images have {len(shapes)} different sizes")
    return np.stack(list(images))


def decode_batch(blob: bytes) -> Batch:
    """The array of an enqueue, uint8 [B, H, W, 3], writable. Nothing is unpickled; raises RewardFailed."""
    source = io.BytesIO(blob)
    try:
        shape, fortran, dtype = _read_header(source)
    except (ValueError, EOFError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise RewardFailed(f"the array is not a readable .npy file: {error}") from None
    _check_batch(dtype, shape)
    expected, there = math.prod(shape), len(blob) - source.tell()
    if there != expected:
        raise RewardFailed(f"the array has {there} bytes where its shape {list(shape)} needs {expected}")
    flat = np.frombuffer(blob, dtype=np.uint8, offset=source.tell())
    return flat.reshape(shape, order="F" if fortran else "C").copy(order="C")


def _read_header(source: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(source)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version[0]}.{version[1]}, known are 1.0 and 2.0")
    return cast(tuple[tuple[int, ...], bool, np.dtype[Any]], readers[version](source, max_header_size=_HEADER_LIMIT))


def _check_batch(dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        raise RewardFailed(f"images must be uint8 [B, H, W, 3], got {dtype} {list(shape)}")
    if shape[1] * shape[2] > MAX_PIXELS:
        raise RewardFailed(f"{shape[2]}x{shape[1]} is outside 1 to {MAX_PIXELS} pixels")


def encode_ticket(ticket: Ticket) -> bytes:
    """Answer to an enqueue."""
    replica = {"replica_id": ticket.replica_id} if ticket.replica_id else {}
    return orjson.dumps({"uuid": ticket.uuid, **replica})


def parse_ticket(body: bytes) -> Ticket:
    """The ticket, or RewardFailed. Both parts come back in later requests, so neither may break a header."""
    document = load_object(body, "the answer to enqueue")
    refuse_error_field(document, "the answer to enqueue")
    uuid, replica = document.get("uuid"), document.get("replica_id") or ""
    if not isinstance(uuid, str) or not _is_token(uuid):
        raise RewardFailed(f"uuid of the answer to enqueue is {shown(uuid)}, not a short printable text")
    if not isinstance(replica, str) or (replica and not _is_token(replica)):
        raise RewardFailed(f"replica_id of the answer to enqueue is {shown(replica)}, not a short printable text")
    return Ticket(uuid, replica)


def _is_token(text: str) -> bool:
    return 0 < len(text) <= 200 and all("!" <= c <= "~" for c in text)


# ---------------------------------------------------------------------------------------------- ping and pull


def encode_ping(reward_fn: str) -> bytes:
    """Form body of a ping. It asks for nothing; the service only says that it is there."""
    info = {"prompts": [], "reward_fn": {reward_fn: 1.0}, "media_type": "image"}
    return urlencode({"info_data": orjson.dumps(info).decode()}).encode()


def encode_pull(uuid: str, reward_fn: str) -> bytes:
    """Form body of a pull: one reward function of one task."""
    return urlencode({"uuid": uuid, "type": reward_fn}).encode()


def parse_pull(fields: Mapping[str, str] | bytes) -> tuple[str, str]:
    """uuid and reward function that a pull asks for, from form fields or from a form body. RequestRefused (400)."""
    if isinstance(fields, bytes):
        try:
            fields = dict(parse_qsl(fields.decode("ascii"), keep_blank_values=True, strict_parsing=bool(fields)))
        except ValueError:
            raise RequestRefused(400, "bad-request", "a pull is a form with the fields uuid and type") from None
    uuid = fields.get("uuid", "")
    if not isinstance(uuid, str) or not uuid:
        raise RequestRefused(400, "bad-request", "a pull needs the form field uuid")
    return uuid, fields.get("type") or DEFAULT_TYPE


def encode_result(reward_fn: str, scores: Mapping[str, Sequence[float]], images: Batch, seconds: float) -> bytes:
    """Answer to a pull that found its scores. Raises RewardFailed for a number that is not finite."""
    out = {key: [finite(v, f"{key} of image {n}") for n, v in enumerate(values)] for key, values in scores.items()}
    about = {"shape": list(images.shape), "dtype": "torch.uint8",
             "min": f"{int(images.min()):.3f}", "max": f"{int(images.max()):.3f}"}  # fmt: skip
    return orjson.dumps(
        {"scores": out, "input_info": about, "duration": f"{seconds:.2f}", "decoded_duration": "0.00",
         "type": reward_fn}
    )  # fmt: skip


def parse_result(body: bytes, keys: Sequence[str], count: int) -> dict[str, list[float]]:
    """The scores under each of `keys`, `count` finite numbers each, in the order of the images.

    Other keys are not looked at: services answer texts and tables beside numbers. Raises RewardFailed; for a missing
    key it lists those that are there.
    """
    document = load_object(body, "the result")
    refuse_error_field(document, "the result")
    scores = document.get("scores")
    if not isinstance(scores, dict):
        raise RewardFailed(f"scores of the result is {shown(scores)}, not an object")
    missing = [key for key in keys if key not in scores]
    if missing:
        there = ", ".join(sorted(scores)) or "none"
        raise RewardFailed(f"the result has no score {missing[0]!r}; there are: {there}", hint="correct score_key")
    return {key: _column(scores[key], key, count) for key in keys}


def _column(values: object, key: str, count: int) -> list[float]:
    if not isinstance(values, list):
        raise RewardFailed(f"score {key!r} is {shown(values)}, not a list of numbers")
    if len(values) != count:
        raise RewardFailed(f"{len(values)} scores under {key!r} for {count} images")
    return [finite(value, f"score {key!r} of image {n}") for n, value in enumerate(values)]
