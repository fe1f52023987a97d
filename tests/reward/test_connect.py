"""Which client a provider gets, and how pixels travel to it."""

from __future__ import annotations

from typing import Any

import pytest

from nftctl.profile.schema import Provider, Reward
from nftctl.reward.client import RewardClient
from nftctl.reward.connect import connect
from nftctl.reward.cosmos_rl import CosmosClient


def client(reward: Reward | None = None, **provider: Any) -> Any:
    given = Provider.model_validate({"name": "p", "revision": "r", **provider})
    return connect(given, reward or Reward(), url="http://127.0.0.1:1", revision="r", token="")


@pytest.mark.parametrize(
    ("kind", "asked", "sent"),
    [("embedded", "png", "raw"), ("http", "png", "png"), ("embedded", "jpeg", "jpeg"), ("http", "raw", "raw")],
)
def test_a_scorer_on_this_host_gets_pixels_unpacked_unless_they_are_to_be_lossy(
    kind: Any, asked: Any, sent: str
) -> None:
    found = client(Reward(encoding=asked), kind=kind)
    assert isinstance(found, RewardClient)
    assert found._encoding == sent


def test_the_protocol_decides_the_client() -> None:
    assert isinstance(client(protocol="cosmos-rl"), CosmosClient)
