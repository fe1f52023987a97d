"""A cosmos-rl reward client, written from the description of its wire format alone: it imports nothing of nftctl.

In a test:      Client(url).score(images, prompts, {"hpsv3": 1.0})
As a process:   python tests/interop/cosmos_client.py URL REWARD PROMPT...   (scores grey images; prints JSON)

Scores are weighted and added by the client, as the format wants it. Only the standard library and NumPy.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# A proxy of the environment must not see loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Client:
    """`url` is the root of the service; enqueue and pull are below it. `polls` counts the pulls that found nothing."""

    def __init__(self, url: str, token: str = "", *, patience_s: float = 30.0, pause_s: float = 0.02) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.patience_s = patience_s
        self.pause_s = pause_s
        self.polls = 0

    def ping(self) -> dict[str, Any]:
        """Say hello; the information is not looked at by the service."""
        form = urllib.parse.urlencode({"info_data": json.dumps({"media_type": "image"})}).encode()
        return json.loads(self._post("/api/reward/ping", form, {}))

    def enqueue(self, images: np.ndarray, prompts: Sequence[str], rewards: Mapping[str, float], **extras: Any) -> dict:
        """Hand in float [B, C, H, W] images in 0..1, as a trainer has them. The ticket."""
        pixels = np.clip(np.rint(images * 255), 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
        head = {
            "prompts": list(prompts),
            "reward_fn": dict(rewards),
            "media_type": "image",
            "video_infos": [],
            **extras,
        }
        blob = io.BytesIO()
        np.save(blob, np.ascontiguousarray(pixels), allow_pickle=False)
        body = json.dumps(head).encode() + b"\n" + blob.getvalue()
        return json.loads(self._post("/api/reward/enqueue", body, {"Content-Type": "application/octet-stream"}))

    def pull(self, ticket: Mapping[str, str], reward: str | None) -> dict[str, Any] | None:
        """One reward's result, or None while it is not there (400)."""
        fields = {"uuid": ticket["uuid"]} | ({} if reward is None else {"type": reward})
        headers = {"X-Lepton-Replica-Target": ticket["replica_id"]} if "replica_id" in ticket else {}
        try:
            return json.loads(self._post("/api/reward/pull", urllib.parse.urlencode(fields).encode(), headers))
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            error.close()
            return None

    def wait(self, ticket: Mapping[str, str], reward: str) -> dict[str, Any]:
        """Poll until the result is there; TimeoutError after `patience_s`."""
        end = time.monotonic() + self.patience_s
        while (found := self.pull(ticket, reward)) is None:
            self.polls += 1
            if time.monotonic() > end:
                raise TimeoutError(f"no {reward} for {ticket['uuid']}")
            time.sleep(self.pause_s)
        return found

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        rewards: Mapping[str, float],
        keys: Mapping[str, str] | None = None,
    ) -> list[float]:
        """Weighted sum per image. `keys` names another score key than the reward's own; "a+b" adds two."""
        ticket = self.enqueue(images, prompts, rewards)
        total = np.zeros(len(prompts))
        for reward, weight in rewards.items():
            scores = self.wait(ticket, reward)["scores"]
            columns = [np.asarray(scores[key], float) for key in (keys or {}).get(reward, reward).split("+")]
            total += weight * np.clip(sum(columns), -5, 5)
        return total.tolist()

    def _post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        authorised = {"Authorization": f"Bearer {self.token}"} if self.token and not path.endswith("/ping") else {}
        request = urllib.request.Request(self.url + path, data=body, headers={**headers, **authorised}, method="POST")
        with _OPENER.open(request, timeout=self.patience_s) as response:
            return response.read()


def main(url: str, reward: str, *prompts: str) -> None:
    """Score one grey image per prompt, from black to white."""
    levels = np.linspace(0, 1, len(prompts))
    images = np.broadcast_to(levels[:, None, None, None], (len(prompts), 3, 16, 16))
    client = Client(url, os.environ.get("REMOTE_REWARD_TOKEN", ""))
    print(json.dumps({"ping": client.ping(), "scores": client.score(images, prompts, {reward: 1.0})}))


if __name__ == "__main__":
    main(*sys.argv[1:])
