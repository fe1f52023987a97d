"""What is recorded, when, and what a recording is played with. A tape without a GPU does the work again instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nftctl.model import adapters, recorded, shard
from nftctl.model.cosmos3 import split
from nftctl.model.family import Denoiser
from nftctl.model.sd3_denoiser import Sd3Denoiser
from nftctl.model.sd3_encoder import PromptEmbeds
from nftctl.profile.schema import Lora, Model
from tests.model.bases import build_transformer
from tests.model.sd3_bases import build_sd3

SHAPE = (2, 4, 1, 8, 12)


class Again:
    """Replays by doing the work again and writing what it leaves where the first one left it."""

    def __init__(self, work: Callable[[], Tensor], left: Tensor) -> None:
        self.work, self.left, self.replays = work, left, 0

    def replay(self) -> None:
        self.replays += 1
        self.left.copy_(self.work())


class Tape(recorded.Tape):
    def __init__(self, room: int = 1 << 60) -> None:
        super().__init__()
        self.room = room
        self.graphs: list[Again] = []

    def record(self, work: Any, *, trains: bool) -> tuple[recorded.Graph, Any]:
        assert not trains
        self.graphs.append(Again(work, work()))
        self.graphs[-1].left.zero_()
        return self.graphs[-1], self.graphs[-1].left

    def free(self, device: torch.device) -> int:
        return self.room

    def allocated(self, device: torch.device) -> int:
        return 0


def whole(tape: Tape) -> tuple[Denoiser, recorded.Recorder]:
    denoiser = Sd3Denoiser(build_sd3())
    adapters.add_adapters(denoiser, Lora(targets=["to_q", "to_k"]), seed=0)
    with torch.no_grad():
        for i, parameter in enumerate(adapters.policy_parameters(denoiser).values()):
            parameter.add_(0.01 * (i % 3))
    denoiser.sharding = shard.Sharding("gather-once", [], shard.CountedAllGather(), frozen=True, whole=True)
    denoiser.recorder = recorded.Recorder(denoiser, tape)
    return denoiser, denoiser.recorder


def prompts(seed: int, denoiser: Any, tail: int = 1) -> PromptEmbeds:
    generator = torch.Generator().manual_seed(seed)
    config: Any = build_sd3().config
    embeds = torch.randn(2, 5, config.joint_attention_dim, generator=generator)
    pooled = torch.randn(2, config.pooled_projection_dim, generator=generator)
    return PromptEmbeds(embeds, pooled, tail)


def batch(seed: int, denoiser: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, denoiser.channels, *SHAPE[2:], generator=generator)
    return x, torch.rand(2, generator=generator)


@torch.no_grad()
def computed(denoiser: Denoiser, x: Tensor, sigma: Tensor, conditioning: PromptEmbeds) -> Tensor:
    recorder, denoiser.recorder = denoiser.recorder, None
    v: Tensor = denoiser(x, sigma, conditioning)
    denoiser.recorder = recorder
    return v


@torch.no_grad()
def test_a_shape_is_recorded_when_it_comes_again_and_played_with_what_is_given() -> None:
    tape = Tape()
    denoiser, recorder = whole(tape)
    for turn, (of_x, of_prompts) in enumerate([(1, 1), (2, 1), (3, 2), (3, 2), (4, 1)]):
        given = prompts(of_prompts, denoiser)
        x, sigma = batch(of_x, denoiser)
        assert torch.equal(denoiser(x, sigma, given), computed(denoiser, x, sigma, given))
        assert recorder.recordings == (turn > 0)
    assert (recorder.played, tape.graphs[0].replays) == (8, 4)
    assert denoiser.forwards == 5 * 4


@torch.no_grad()
def test_what_a_recording_left_is_not_what_was_returned() -> None:
    denoiser, _ = whole(Tape())
    given = prompts(1, denoiser)
    denoiser(*batch(1, denoiser), given)
    first = denoiser(*batch(1, denoiser), given)
    kept = first.clone()
    assert not torch.equal(denoiser(*batch(2, denoiser), given), kept)
    assert torch.equal(first, kept)


@torch.no_grad()
def test_every_copy_precision_and_form_has_its_own() -> None:
    denoiser, recorder = whole(Tape())
    x, sigma = batch(1, denoiser)
    forms = [
        ("policy", False, 1),
        ("old", False, 1),
        ("reference", False, 1),
        ("policy", True, 1),
        ("policy", False, 3),
    ]
    for _ in range(2):
        for which, lowered, tail in forms:
            denoiser.lowered = lowered
            with adapters.weights(denoiser, which):  # type: ignore[arg-type]
                denoiser(x, sigma, prompts(1, denoiser, tail))
    denoiser.lowered = False
    assert recorder.recordings == len(forms)


@torch.no_grad()
def test_recordings_are_dropped_when_the_weights_lie_elsewhere() -> None:
    denoiser, recorder = whole(Tape())
    given, (x, sigma) = prompts(1, denoiser), batch(1, denoiser)
    for _ in range(2):
        denoiser(x, sigma, given)
    assert (recorder.recordings, recorder.played) == (1, 2)
    assert denoiser.sharding is not None
    denoiser.sharding.gathering += 1
    denoiser(*batch(1, denoiser), prompts(2, denoiser))
    assert (recorder.recordings, recorder.played) == (1, 4)
    denoiser.sharding.whole = False
    denoiser(*batch(1, denoiser), prompts(2, denoiser))
    assert recorder.played == 4


@torch.no_grad()
def test_nothing_is_recorded_in_memory_that_the_run_has_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(room=0)
    denoiser, recorder = whole(tape)
    given, (x, sigma) = prompts(1, denoiser), batch(1, denoiser)
    for _ in range(3):
        assert torch.equal(denoiser(x, sigma, given), computed(denoiser, x, sigma, given))
    assert recorder.recordings == 0
    tape.room = 1 << 60
    monkeypatch.setattr(recorded, "RECORDINGS", 0)
    denoiser(x, sigma, given)
    assert recorder.recordings == 0
    monkeypatch.undo()
    denoiser(x, sigma, given)
    assert recorder.recordings == 1


def test_batches_that_cannot_share_a_form_are_computed() -> None:
    """Cosmos3 shares forms by packing keys, which takes a kernel of CUDA's; here every batch keeps its own."""
    tower, denoiser = split(build_transformer())
    denoiser.sharding = shard.Sharding("replicate-base", [], shard.CountedAllGather(), frozen=True, whole=True)
    cache = tower.run([[3, 4, 5], [6]])
    x, sigma = torch.randn(2, 3, 1, 4, 6), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        expected = denoiser(x, sigma, cache)
        denoiser.recorder = recorded.Recorder(denoiser, Tape())
        for _ in range(3):
            assert torch.equal(denoiser(x, sigma, cache), expected)
    assert denoiser.recorder.recordings == 0


@pytest.mark.parametrize(
    ("graphs", "device", "deterministic", "expected"),
    [
        ("auto", "cuda", False, True),
        ("auto", "cuda", True, False),
        ("auto", "cpu", False, False),
        ("never", "cuda", False, False),
    ],
)
def test_where_recordings_are_made(graphs: str, device: str, deterministic: bool, expected: bool) -> None:
    model = Model.model_validate({"cuda_graphs": graphs})
    assert recorded.wanted(model, device=torch.device(device), deterministic=deterministic) is expected
