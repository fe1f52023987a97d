"""From a provider of the profile to the client that speaks its protocol."""

from __future__ import annotations

from nftctl.profile.schema import Provider, Reward
from nftctl.reward.client import RewardClient
from nftctl.reward.cosmos_rl import CosmosClient
from nftctl.reward.exchange import ServiceClient


def connect(provider: Provider, reward: Reward, *, url: str, revision: str, token: str) -> ServiceClient:
    """A client for `provider` at `url`, with the limits of `reward`. Raises RewardFailed for an unusable url or token.

    Example: connect(provider, profile.reward, url=provider.url, revision="r1", token=os.environ["MY_TOKEN"])
    """
    limits = {
        "connect_timeout": reward.connect_timeout_s,
        "read_timeout": reward.read_timeout_s,
        "retries": reward.retries,
        "max_items": reward.max_items_per_request,
    }
    if provider.protocol == "cosmos-rl":
        name = provider.name
        fn, key = provider.reward_fn or name, provider.score_key or name
        return CosmosClient(url, revision, token, reward_fn=fn, score_key=key, **limits)
    # On one host, packing pixels takes longer than passing them on; they arrive the same.
    encoding = "raw" if provider.kind == "embedded" and reward.encoding == "png" else reward.encoding
    return RewardClient(url, revision, token, encoding=encoding, quality=reward.jpeg_quality, **limits)
