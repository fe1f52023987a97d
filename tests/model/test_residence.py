"""Where prompt encoders live: the same bits everywhere, one visit for all that is missing, nothing left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nftctl.errors import CheckpointUnusable
from nftctl.model.registry import load_family
from nftctl.model.residence import InHostMemory, Residence, forget
from nftctl.model.weights import Tensors
from nftctl.profile.schema import Model

from .bases import build_transformer, write_pixel_base
from .sd3_bases import build_t5, write_sd3_base

CPU = torch.device("cpu")
HOMES = ["resident", "offload", "per-step"]
PROMPTS = ["a red seven", "", "two blue birds", "a red seven"]
SHAPES = {"cosmos3": (8, 12), "sd3": (64, 96)}


@pytest.fixture(scope="module", params=["cosmos3", "sd3"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sd3":
        return request.param, write_sd3_base(folder)
    return request.param, write_pixel_base(folder, build_transformer(dtype=torch.bfloat16))


@pytest.fixture
def base(written: tuple[str, Path], tmp_path: Path) -> tuple[str, Path]:
    return written[0], Path(shutil.copytree(written[1], tmp_path / "base"))


def load(base: tuple[str, Path], home: str, **how: Any) -> Any:
    name, folder = base
    height, width = SHAPES[name]
    model = Model(height=height, width=width, dtype="bfloat16", prompt_encoder=home)  # type: ignore[arg-type]
    return load_family(model, str(folder), name, CPU, seed=3, **how).encoder


def modules(encoder: Any) -> list[torch.nn.Module]:
    return [encoder.tower] if hasattr(encoder, "tower") else encoder.parts.encoders()


def held(encoder: Any) -> int:
    """Bytes of the encoder's weights, each once."""
    tensors = [p for module in modules(encoder) for p in module.parameters() if not p.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def bits(encoder: Any, prompts: list[str]) -> Iterator[torch.Tensor]:
    for one in (*encoder.encode(prompts), *encoder.encode(["worse"], negative=True)):
        yield from (getattr(one, name) for name in ("keys", "values", "embeds", "pooled") if hasattr(one, name))


def test_what_is_encoded_is_the_same_to_the_bit_wherever_the_encoder_lives(base: tuple[str, Path]) -> None:
    wanted = list(bits(load(base, "resident"), PROMPTS))
    for home in HOMES[1:]:
        encoder = load(base, home)
        found = list(bits(encoder, PROMPTS))
        again = list(bits(load(base, home), PROMPTS[::-1]))  # and whatever was encoded before
        assert len(found) == len(wanted) == 10
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
        assert sorted(t.sum().item() for t in again) == sorted(t.sum().item() for t in wanted)
        assert not any(t.requires_grad for t in found)
        # Read twice, it is the same once more.
        encoder._remembered.limit = 0
        encoder.encode(["something else"])
        assert all(torch.equal(a, b) for a, b in zip(bits(encoder, PROMPTS), wanted, strict=True))


@pytest.mark.parametrize("home", HOMES)
def test_all_that_is_missing_of_a_call_is_one_visit(base: tuple[str, Path], home: str) -> None:
    encoder = load(base, home)
    assert (encoder.visits, encoder.encoded) == (0, 0)
    encoder.encode(PROMPTS)
    assert (encoder.visits, encoder.encoded) == (1, 3)
    encoder.encode(PROMPTS[:2])
    assert (encoder.visits, encoder.encoded) == (1, 3)
    with encoder.visit():
        encoder.encode(["one"], negative=True)
        encoder.encode(["two", *PROMPTS])
    assert (encoder.visits, encoder.encoded) == (2, 5)
    with encoder.visit():
        encoder.encode(PROMPTS)  # all remembered: nothing has to come
    assert encoder.visits == 2


@pytest.mark.parametrize("home", HOMES)
def test_nothing_but_the_resident_and_the_host_s_copy_is_held_between_visits(base: tuple[str, Path], home: str) -> None:
    encoder, whole = load(base, home), held(load(base, "resident"))
    between = 0 if home == "per-step" else whole
    assert whole > 0
    assert held(encoder) == between
    for prompt in ("a", "b"):
        with encoder.visit():
            assert held(encoder) == between
            encoder.encode([prompt])
            assert held(encoder) == whole
        assert held(encoder) == between
        assert not any(p.requires_grad for module in modules(encoder) for p in module.parameters())
        assert not any(module.training for module in modules(encoder))
        assert all(b.device == CPU and not b.is_meta for module in modules(encoder) for b in module.buffers())


def test_an_encoder_that_comes_later_is_not_read_at_the_start(
    pixel_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = Tensors.read

    def noted(self: Tensors, name: str, rows: slice | None = None) -> torch.Tensor:
        read.append(name)
        return plain(self, name, rows)

    monkeypatch.setattr(Tensors, "read", noted)
    encoder = load(("cosmos3", pixel_base), "per-step", unread=True)
    assert read == []
    encoder.encode(["a", "b"])
    assert sorted(read) == sorted(name for name, _ in encoder.tower.named_parameters())


def test_a_failed_prompt_leaves_nothing_behind(base: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load(base, "per-step")

    def fail(prompt: str, negative: bool) -> Any:
        assert held(encoder) > 0
        raise RuntimeError("no memory")

    monkeypatch.setattr(encoder, "_run", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        encoder.encode(["a"])
    monkeypatch.undo()
    assert held(encoder) == 0
    encoder.encode(["a"])
    assert (encoder.visits, encoder.encoded) == (2, 1)


def test_what_comes_next_is_encoded_in_the_same_visit_as_far_as_it_is_remembered(base: tuple[str, Path]) -> None:
    encoder = load(base, "per-step")
    one = encoder.encode(["x"])[0].nbytes
    ahead = ["c", "d", "e", "f", "g"]
    encoder._remembered.limit = 4 * one
    encoder.encode(["a", "b"], ahead=ahead)
    assert (encoder.visits, encoder.encoded) == (2, 5)  # x; then a and b, c and d
    encoder.encode(["c", "d"], ahead=ahead)  # nothing is missing, so nothing is fetched
    assert (encoder.visits, encoder.encoded) == (2, 5)
    encoder.encode(["e"], ahead=["e", "f", "c"])
    assert (encoder.visits, encoder.encoded) == (3, 7)
    encoder.encode(["e", "f", "c"])
    assert encoder.visits == 3


@pytest.mark.parametrize("change", ["written anew", "gone"])
def test_files_that_are_not_those_of_the_start_are_not_read(base: tuple[str, Path], change: str) -> None:
    encoder = load(base, "per-step")
    encoder.encode(["a"])
    folder = base[1] / ("transformer" if base[0] == "cosmos3" else "text_encoder_2")
    (file,) = folder.glob("*.safetensors")
    if change == "gone":
        file.unlink()
    else:
        os.utime(file, (1.0, 1.0))
    encoder.encode(["a"])
    with pytest.raises(CheckpointUnusable, match=f"{file} is not what it was"):
        encoder.encode(["b"])


def test_an_embedding_under_two_names_is_forgotten_under_both() -> None:
    t5 = build_t5(0)
    assert t5.shared.weight is t5.encoder.embed_tokens.weight
    forget(t5)
    assert t5.shared.weight.is_meta
    assert t5.encoder.embed_tokens.weight.is_meta


def test_host_memory_holds_each_tensor_once() -> None:
    t5 = build_t5(0).requires_grad_(False)
    addresses = {name: p.data_ptr() for name, p in t5.named_parameters()}
    home = InHostMemory([t5], CPU)
    for _ in range(2):
        with home.visit():
            home.arrive()
        assert {name: p.data_ptr() for name, p in t5.named_parameters()} == addresses
    assert home.visits == 2


def test_weights_come_inside_a_visit_only() -> None:
    with pytest.raises(RuntimeError, match="during a visit"):
        Residence().arrive()
