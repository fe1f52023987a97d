"""Fixtures: bases on disk and model sections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nftctl.profile.schema import Lora, Model

from .bases import build_transformer, write_pixel_base, write_vae_base


@pytest.fixture(scope="session")
def pixel_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pixel_base(tmp_path_factory.mktemp("pixel"), build_transformer())


@pytest.fixture(scope="session")
def vae_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return write_vae_base(tmp_path_factory.mktemp("vae"))


@pytest.fixture
def make_model() -> Callable[..., Model]:
    """A `Model` section for 8 x 12 pixels in float32, with changes."""

    def make(**changes: Any) -> Model:
        return Model(**{"height": 8, "width": 12, "dtype": "float32", "lora": Lora(rank=2, alpha=4.0), **changes})

    return make
