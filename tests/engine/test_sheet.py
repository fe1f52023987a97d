"""Base, old and policy of a checkpoint from one noise: each column is made by the weights whose name it has."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nftctl.engine import sheet as work
from nftctl.engine.sheet import Sheet
from nftctl.errors import CheckpointUnusable, EnvironmentUnfit
from nftctl.model.export import tensor_of
from nftctl.model.registry import load_family
from nftctl.model.trained import Trained, open_trained
from nftctl.profile.load import load_resolved
from nftctl.profile.prompts import Prompt
from nftctl.profile.schema import Profile
from nftctl.roles.rollout import RolloutRole
from nftctl.roles.trajectory import Sampling
from tests.model.trained_runs import make_trained

CPU = torch.device("cpu")
TEXTS = ("a red zero", "a blue seven", "a green two")
SHEET = Sheet([Prompt(t, t) for t in TEXTS], ["policy", "base", "ema", "old"], 5, Sampling(4, 3.0, 2.0))


class Made:
    """A trained run, and what the command makes of it."""

    def __init__(self, folder: Path, *sets: str) -> None:
        _, checkpoint, self.family = make_trained(folder, sets=sets)
        self.trained: Trained = open_trained(checkpoint)
        self.profile: Profile = load_resolved(self.trained.resolved, name="first", text="", env={}).profile
        self.loaded = work.load_base(self.trained, self.profile, self.trained.base(), CPU)
        self.images = work.draw(SHEET, self.trained, self.loaded, self.profile, CPU, lambda text: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("sheet"))


def column(images: Any, name: str) -> Any:
    return images[:, SHEET.columns.index(name)]


@pytest.mark.parametrize("name", ["policy", "old", "ema"])
def test_a_column_is_what_the_run_itself_samples_from_the_same_noise(made: Made, name: Any) -> None:
    # The run's own family never went through a file.
    role = RolloutRole(made.family, made.profile, rank=1, device=CPU)
    keys = [(5, "grid", row, 0) for row in range(3)]
    theirs = np.stack([image[0].numpy() for image in role.sample_fixed(TEXTS, keys, SHEET.how, name)])
    assert made.images.shape == (3, 4, 8, 8, 3)
    assert (column(made.images, name) == theirs).all()


def test_the_base_column_is_the_base_without_any_adapter(made: Made) -> None:
    plain = load_family(made.profile.model, "embedded", "cosmos3", CPU)
    role = RolloutRole(plain, made.profile, rank=0, device=CPU)
    bare = np.stack([image[0].numpy() for image in role.sample_fixed(TEXTS, SHEET.keys, SHEET.how, "reference")])
    assert (column(made.images, "base") == bare).all()


def test_the_four_differ_and_see_one_noise_per_row(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    for a, b in combinations(SHEET.columns, 2):
        assert (column(made.images, a) != column(made.images, b)).any(axis=(1, 2, 3)).all()
    seen = []
    inner = RolloutRole.denoise

    def watched(self: Any, conditions: Any, negative: Any, noise: torch.Tensor, *rest: Any) -> Any:
        seen.append(noise)
        return inner(self, conditions, negative, noise, *rest)

    monkeypatch.setattr(RolloutRole, "denoise", watched)
    again = work.draw(SHEET, made.trained, made.loaded, made.profile, CPU, lambda text: None)
    assert (again == made.images).all()
    assert len(seen) == 4
    assert all(torch.equal(seen[0], noise) for noise in seen)
    assert not torch.equal(seen[0][0], seen[0][1])


def test_whole_trained_weights_are_worn_one_after_another(tmp_path: Path) -> None:
    whole = Made(tmp_path, 'model.train="full"')
    assert whole.trained.adapted("policy") == []
    for name in ("policy", "old", "ema"):
        plain = load_family(whole.profile.model, "embedded", "cosmos3", CPU)
        state = {n: tensor_of(whole.trained.tensors, own) for n, own in whole.trained.copy(name).items()}
        missing = plain.denoiser.load_state_dict(state, strict=False)
        assert missing.unexpected_keys == []
        role = RolloutRole(plain, whole.profile, rank=0, device=CPU)
        bare = np.stack([image[0].numpy() for image in role.sample_fixed(TEXTS, SHEET.keys, SHEET.how, "policy")])
        assert (column(whole.images, name) == bare).all()
    plain = load_family(whole.profile.model, "embedded", "cosmos3", CPU)
    role = RolloutRole(plain, whole.profile, rank=0, device=CPU)
    bare = np.stack([image[0].numpy() for image in role.sample_fixed(TEXTS, SHEET.keys, SHEET.how, "policy")])
    # The base is the second column, and was drawn before its weights were overwritten.
    assert (column(whole.images, "base") == bare).all()


def test_an_adapter_of_another_shape_than_the_profile_s_is_refused(made: Made) -> None:
    other = made.profile.model_copy(
        update={"model": made.profile.model.model_copy(update={"lora": made.profile.model.lora.model_copy(
            update={"targets": ["add_q_proj"]})})}
    )  # fmt: skip
    with pytest.raises(CheckpointUnusable, match="policy is not what its profile trains") as refused:
        work.load_base(made.trained, other, made.trained.base(), CPU)
    assert "layers.0.self_attn.add_k_proj.lora_A" in refused.value.message
    assert "add_q_proj" not in refused.value.message


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentUnfit, match="torch sees no GPU"):
        work.pick_device("cuda")
    assert work.pick_device("auto") == work.pick_device("cpu") == CPU
