"""Compiled layers: what the eager ones compute, a graph per shape and copy and no more, and never a silent fallback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nftctl.model import adapters, compiled
from nftctl.model.cosmos3 import split
from nftctl.profile.schema import Lora, Model

from .bases import build_transformer

SAME_LENGTH = [[[5, 9, 3], [4, 2, 8]], [[5, 9, 3, 7], [4, 2, 8, 1]], [[5, 9], [4, 2]]]
RAGGED = [[[5, 9, 3], [4]], [[5, 9, 3, 2], [4]]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def denoiser() -> tuple[Any, Any]:
    tower, made = split(build_transformer())
    adapters.add_adapters(made, Lora(rank=2, alpha=4.0), seed=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapters.policy_parameters(made).items():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.05, generator=generator)
    return tower.requires_grad_(False), made


def velocity(tower: Any, made: Any, prompts: list[list[int]], which: Any, *, grad: bool = False) -> torch.Tensor:
    x = torch.randn(len(prompts), 3, 1, 6, 4, generator=torch.Generator().manual_seed(1))
    with torch.set_grad_enabled(grad), adapters.weights(made, which):
        result: torch.Tensor = made(x, torch.linspace(0.1, 0.9, len(prompts)), tower.run(prompts))
    return result


def test_layers_share_graphs_and_prompt_lengths_need_none_of_their_own() -> None:
    eager, (tower, made) = denoiser(), denoiser()
    assert compiled.compile_layers(made, backend="eager") == 3
    assert all(compiled.is_compiled(layer) for layer in made.layers)
    assert not any(compiled.is_compiled(layer) for layer in eager[1].layers)
    before, counts = compiled.graphs(), []
    for prompts in [*SAME_LENGTH, *RAGGED]:
        for which in ("old", "policy", "reference"):
            expected = velocity(*eager, prompts, which)
            torch.testing.assert_close(velocity(tower, made, prompts, which), expected, rtol=1e-5, atol=1e-5)
        counts.append(compiled.graphs() - before)
    # Three copies of the weights; three more where a mask is needed.
    assert counts == [3, 3, 3, 6, 6]


def test_gradients_are_those_of_eager_layers() -> None:
    eager, (tower, made) = denoiser(), denoiser()
    compiled.compile_layers(made, backend="aot_eager")
    for pair in (eager, (tower, made)):
        velocity(*pair, SAME_LENGTH[0], "policy", grad=True).square().mean().backward()
    expected = adapters.policy_parameters(eager[1])
    for name, parameter in adapters.policy_parameters(made).items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)


def test_a_layer_that_needs_graphs_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "GRAPHS", 2)
    tower, made = denoiser()
    compiled.compile_layers(made, backend="eager")
    for prompts in ([[5]], [[5], [6]]):
        velocity(tower, made, prompts, "policy")
    with pytest.raises(Exception, match="recompile_limit"):
        velocity(tower, made, [[5], [6], [7]], "policy")


@pytest.mark.parametrize(
    ("setting", "device", "deterministic", "expected"),
    [
        ("auto", "cpu", False, False),
        ("auto", "cuda", False, True),
        ("auto", "cuda", True, False),
        ("always", "cpu", True, True),
        ("never", "cuda", False, False),
    ],
)
def test_who_is_compiled(setting: Any, device: str, deterministic: bool, expected: bool) -> None:
    model = Model(compile=setting)
    assert compiled.wanted(model, device=torch.device(device), deterministic=deterministic) is expected
