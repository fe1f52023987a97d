"""From the bytes of a request to the bytes of its answer, wherever that is done: in a thread or in a worker process.

Owns the checks between a request and the scorers, and what is told about a scorer that raised. Refusals are
RequestRefused with the status to answer; a number that is not finite is never encoded. Knows no HTTP.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nftctl.errors import RewardFailed
from nftctl.reward import cosmos_wire
from nftctl.reward.cosmos_wire import Task
from nftctl.reward.mixture import Mixture, ScorerWrong
from nftctl.reward.protocol import Request, RequestRefused, Score, ServiceInfo, encode_reply, parse_request

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """Bodies by what they answer ("" for the one reply of /v1/score), images scored, seconds spent in the scorers."""

    bodies: dict[str, bytes]
    images: int
    seconds: float


class Judge:
    """A mixture that is served under `revision`. `token` is only ever removed from what is said."""

    def __init__(self, mixture: Mixture, revision: str, max_items: int, token: str = "") -> None:
        self.info = ServiceInfo(mixture.name, revision, ("image",), mixture.components, max_items)
        self.names = mixture.names
        self._mixture = mixture
        self._token = token

    def read(self, body: bytes, key: str) -> Request:
        """The request in `body`, images decoded. RequestRefused: 400, 409 for another revision, 413."""
        request = parse_request(body, max_items=self.info.max_items)
        if key != request.request_id:
            raise RequestRefused(400, "bad-request", "the Idempotency-Key header and request_id are not the same")
        if request.revision != self.info.revision:
            text = f"this service has revision {self.info.revision!r}, the request wants {request.revision!r}"
            raise RequestRefused(409, "revision-differs", text)
        return request

    def answer(self, request: Request) -> Answer:
        """The reply to `request`; RequestRefused (500) when the scorer fails."""
        items = request.items
        images, prompts = [item.image for item in items], [item.prompt for item in items]
        metadata = [dict(item.metadata) for item in items]
        started = time.perf_counter()
        results = self._guarded(lambda: self._mixture.score(images, prompts, metadata))
        seconds = time.perf_counter() - started
        scores = [Score(item.id, value, parts) for item, (value, parts) in zip(items, results, strict=True)]
        return Answer({"": self._sendable(lambda: encode_reply(self.info.revision, scores))}, len(items), seconds)

    def read_task(self, body: bytes) -> Task:
        """See `read_task`."""
        return read_task(body, self.names, self.info.max_items)

    def answer_task(self, task: Task) -> Answer:
        """A result for each reward that `task` wants; RequestRefused (500) when a scorer fails."""
        images, count = list(task.images), len(task.prompts)
        metadata = [_of_image(task.extras, n, count) for n in range(count)]
        started = time.perf_counter()
        tables = self._guarded(lambda: self._mixture.table(task.wanted, images, task.prompts, metadata))
        seconds = time.perf_counter() - started

        def encode() -> dict[str, bytes]:
            return {n: cosmos_wire.encode_result(n, columns, task.images, seconds) for n, columns in tables.items()}

        return Answer(self._sendable(encode), count, seconds)

    def _guarded(self, score: Callable[[], T]) -> T:
        try:
            return score()
        except ScorerWrong as error:
            raise _wrong(error) from None
        except Exception as error:
            _log.error("the scorer raised\n%s", without_secrets(traceback.format_exc(), self._token))
            said = " ".join(without_secrets(f"{type(error).__name__}: {error}", self._token).split())
            raise RequestRefused(500, "scorer-failed", said[:300]) from None

    def _sendable(self, encode: Callable[[], T]) -> T:
        try:
            return encode()
        except (RewardFailed, TypeError, ValueError) as error:
            raise _wrong(error) from None


def read_task(body: bytes, names: Sequence[str], max_items: int) -> Task:
    """The cosmos-rl task in `body`. RequestRefused: 400, also for a reward that is not one of `names`; 413."""
    task = cosmos_wire.parse_task(body, max_items=max_items)
    unknown = [name for name in task.wanted if name not in names]
    if unknown or not task.wanted:
        said = (
            f"the reward {unknown[0]!r} is not served here" if unknown else "no reward of positive weight is asked for"
        )
        raise RequestRefused(400, "unknown-reward", f"{said}; served are: {', '.join(names)}")
    return task


def without_secrets(text: str, token: str) -> str:
    """`text` without the token and without the value of any environment variable that is named like a secret."""
    names = ("TOKEN", "KEY", "SECRET", "PASSWORD")
    secrets = [v for k, v in os.environ.items() if len(v) >= 8 and any(n in k.upper() for n in names)]
    for secret in filter(None, [token, *secrets]):
        text = text.replace(secret, "***")
    return text


def _wrong(error: Exception) -> RequestRefused:
    return RequestRefused(500, "scorer-wrong", f"the scorer's answer cannot be sent: {error}")


def _of_image(extras: dict[str, Any], n: int, count: int) -> dict[str, Any]:
    """Extras of image `n`: the n-th entry of every list with one per image, everything else as it is."""
    return {k: v[n] if isinstance(v, list) and len(v) == count else v for k, v in extras.items()}
