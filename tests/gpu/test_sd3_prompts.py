"""Text encoders recorded as CUDA graphs: what they leave of a prompt is what they leave kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nftctl.model import sd3_encoder
from nftctl.model.registry import load_family
from nftctl.model.rehearsal import write_base
from nftctl.model.replayed import Replayed
from nftctl.profile.schema import Model

pytestmark = pytest.mark.gpu

PROMPTS = ["a red cube on a wooden table", "three white birds over a lake at dawn", "a map", "three white birds"]


def test_replayed_prompts_are_those_of_the_plain_encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_base("sd3-tiny", tmp_path / "base")
    model = Model(height=128, width=128)

    def embeds() -> tuple[Any, list[Any]]:
        family = load_family(model, str(base), "sd3", torch.device("cuda"))
        return family.encoder, family.encoder.encode(PROMPTS)

    encoder, replayed = embeds()
    made = encoder.parts.clip_l[0].forward
    assert isinstance(made, Replayed)
    assert len(made._recordings) == 1
    monkeypatch.setattr(sd3_encoder, "replay", lambda *_: None)
    plain_encoder, plain = embeds()
    assert not isinstance(plain_encoder.parts.clip_l[0].forward, Replayed)
    for ours, theirs in zip(replayed, plain, strict=True):
        torch.testing.assert_close(ours.embeds, theirs.embeds, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(ours.pooled, theirs.pooled, rtol=1e-2, atol=1e-2)
    assert not torch.equal(replayed[0].embeds, replayed[1].embeds)
