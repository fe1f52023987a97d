"""Where prompt encoders live: the same bits everywhere, one visit for all that is missing, nothing left behind.

Cosmos3's comes unit by unit, and no two units are there together.
"""

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
from nftctl.model.residence import InHostMemory, ReadAnew, Residence, forget
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
            assert held(encoder) == (between if base[0] == "cosmos3" else whole)
        assert held(encoder) == between
        assert not any(p.requires_grad for module in modules(encoder) for p in module.parameters())
        assert not any(module.training for module in modules(encoder))
        assert all(b.device == CPU and not b.is_meta for module in modules(encoder) for b in module.buffers())


class Log:
    """What happens to the units of a tower, in order: they come, a prompt passes them, they leave."""

    def __init__(self, encoder: Any, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.there: list[set[int]] = []
        """Units of which any parameter is real while a prompt passes one."""
        units, residence = list(encoder.tower.units), encoder._residence

        def note(what: str, work: Any) -> Any:
            def noted(unit: Any) -> None:
                self.events.append((what, units.index(unit)))
                work(unit)

            return noted

        def passed(unit: Any, *_: Any) -> None:
            self.events.append(("pass", units.index(unit)))
            self.there.append({n for n, u in enumerate(units) if any(not p.is_meta for p in u.parameters())})

        if type(residence) is not Residence:
            patch.setattr(residence, "_bring", note("come", residence._bring))
            patch.setattr(residence, "_leave", note("leave", residence._leave))
        for unit in units:
            unit.register_forward_pre_hook(passed)

    def take(self) -> list[tuple[str, int]]:
        events, self.events = self.events, []
        return events


def through(units: int, prompts: int) -> list[tuple[str, int]]:
    """All prompts pass a unit before the next one comes."""
    return [event for n in range(units) for event in (("come", n), *[("pass", n)] * prompts, ("leave", n))]


@pytest.fixture
def deep(tmp_path: Path) -> tuple[str, Path]:
    return "cosmos3", write_pixel_base(tmp_path, build_transformer(dtype=torch.bfloat16, num_hidden_layers=5))


@pytest.mark.parametrize("home", HOMES)
def test_every_prompt_that_is_missing_passes_a_unit_before_the_next_one_comes(
    deep: tuple[str, Path], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(deep, home)
    log = Log(encoder, monkeypatch)

    def expected(prompts: int) -> list[tuple[str, int]]:
        return [event for event in through(6, prompts) if home != "resident" or event[0] == "pass"]

    encoder.encode(PROMPTS)
    assert log.take() == expected(3)
    encoder.encode([*PROMPTS, "new"], ahead=["a", "", "b"])
    assert log.take() == expected(3)
    encoder.encode(["a", "b", *PROMPTS], ahead=["c"])
    assert log.take() == []
    with encoder.visit():
        encoder.encode(["worse"], negative=True)
        encoder.encode(["c"])
    assert log.take() == 2 * expected(1)
    assert (encoder.visits, encoder.encoded) == (3, 8)
    # Where units are nowhere else, the one that is passed is the only one that is real: the largest is the peak.
    alone = [{unit} for prompts in (3, 3, 1, 1) for unit in range(6) for _ in range(prompts)]
    assert log.there == (alone if home == "per-step" else [set(range(6))] * len(alone))


def test_the_units_of_a_tower_hold_each_of_its_tensors_once(deep: tuple[str, Path]) -> None:
    tower = load(deep, "resident").tower
    assert len(tower.units) == 6
    parameters = [p for unit in tower.units for p in unit.parameters()]
    assert sorted(map(id, parameters)) == sorted(map(id, tower.parameters()))


def test_an_encoder_that_comes_later_is_not_read_at_the_start_and_then_each_tensor_once(
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
    names = sorted(name for name, _ in encoder.tower.named_parameters())
    encoder.encode(["a", "b", "c"], ahead=["d", "e"])
    assert encoder.encoded == 5
    assert sorted(read) == names
    encoder.encode(["f"])
    assert sorted(read) == sorted(2 * names)


def test_weights_that_start_anew_are_the_same_in_every_home(deep: tuple[str, Path]) -> None:
    keys = ["layers.1.self_attn.to_k", "layers.0.mlp", "embed_tokens"]
    wanted, stored = (list(bits(load(deep, "resident", skip_keys=skip), PROMPTS)) for skip in (keys, []))
    assert not torch.equal(wanted[0], stored[0])
    for home in HOMES[1:]:
        found = list(bits(load(deep, home, skip_keys=keys), PROMPTS))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_failed_prompt_leaves_nothing_behind(base: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load(base, "per-step")
    inside = encoder.tower.layers[1] if base[0] == "cosmos3" else encoder.parts.clip_g[0]

    def fail(*_: Any, **__: Any) -> Any:
        assert held(encoder) > 0
        raise RuntimeError("no memory")

    monkeypatch.setattr(inside, "forward", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        encoder.encode(["a", "b"])
    monkeypatch.undo()
    assert held(encoder) == 0
    assert (encoder.visits, encoder.encoded) == (1, 0)
    encoder.encode(["a"])
    assert (encoder.visits, encoder.encoded) == (2, 1)


@pytest.mark.parametrize("home", HOMES[1:])
def test_a_unit_that_fails_is_given_back_before_the_error_is_seen(
    deep: tuple[str, Path], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(deep, home)
    with monkeypatch.context() as patch:
        log = Log(encoder, patch)

        def fail(*_: Any) -> Any:
            raise RuntimeError("no memory")

        patch.setattr(encoder.tower.layers[1], "forward", fail)
        with encoder.visit():
            with pytest.raises(RuntimeError, match="no memory"):
                encoder.encode(["a", "b"])
            assert log.take() == [*through(2, 2), ("come", 2), ("pass", 2), ("leave", 2)]
    assert encoder.encode(["a"])[0].rows == 1


def test_a_unit_that_came_in_part_is_given_back(deep: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, read, plain = load(deep, "per-step"), [0], Tensors.read

    def failing(self: Tensors, name: str, rows: slice | None = None) -> torch.Tensor:
        read[0] += 1
        if read[0] == 7:
            assert held(encoder) > 0
            raise RuntimeError("the disk is gone")
        return plain(self, name, rows)

    monkeypatch.setattr(Tensors, "read", failing)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        encoder.encode(["a"])
    assert held(encoder) == 0
    encoder.encode(["a"])
    assert (encoder.visits, encoder.encoded) == (2, 1)


def test_what_a_prompt_will_leave_is_known_before_it_is_run(base: tuple[str, Path]) -> None:
    encoder = load(base, "per-step")
    said = [encoder._bytes(prompt, False) for prompt in PROMPTS]
    assert encoder.encoded == 0
    assert said == [one.nbytes for one in encoder.encode(PROMPTS)]


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
    home, module = Residence(), torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="during a visit"):
        home.arrive()
    with home.visit(), pytest.raises(RuntimeError, match="once its visit has begun"), home.unit(module):
        pass


def test_units_of_what_came_whole_stay_for_the_visit() -> None:
    modules = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 2)]
    for module in modules:
        forget(module)
    read: list[torch.nn.Module] = []

    def fill(module: torch.nn.Module) -> None:
        read.append(module)
        module.to_empty(device="cpu")

    home = ReadAnew(modules, fill, [], CPU)
    with home.visit():
        home.arrive()
        for module in (*modules, *modules):
            with home.unit(module):
                assert not any(p.is_meta for each in modules for p in each.parameters())
    assert read == modules
    assert all(p.is_meta for module in modules for p in module.parameters())
