"""The five roles of a rank share one model, and are wired to one profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nftctl.engine.worker import WorkerSpec
from nftctl.errors import ProfileRefused
from nftctl.model import adapters
from nftctl.profile.prompts import base_folder, resolve_prompt_file
from nftctl.profile.schema import Profile, Provider
from nftctl.roles.build import build_roles
from nftctl.roles.reward import Endpoint
from tests.reward.fault_server import FaultServer
from tests.roles.samples import CPU, running


def spec(profile: Profile, url: str) -> WorkerSpec:
    return WorkerSpec(
        profile=profile,
        family="cosmos3",
        base=Path(base_folder("embedded")),
        prompt_path=resolve_prompt_file("embedded", "train"),
        endpoints=(Endpoint(Provider(name="mean", revision="fault/1"), url, "fault/1"),),
        component_names=("mean", "mean/mean"),
        request_key="run/1",
    )


def test_one_step_through_all_five_roles(profile: Callable[..., Profile], control: dist.ProcessGroup) -> None:
    from nftctl.run.state import RunState

    settings = profile('rl.old.decay="copy"')
    with running(FaultServer()) as server:
        roles = build_roles(spec(settings, server.url), rank=0, device=CPU, control=control)
        try:
            roles.reward.begin()
            rows = roles.data.next(47)
            done = roles.rollout.sample(rows, 0, lambda part: roles.reward.submit(0, part))
            roles.policy.prepare(done, RunState())
            roles.reward.collect()
            commit = roles.replay.commit(done)
            row, state = roles.policy.train(commit.trajectories, RunState())
            roles.release()
        finally:
            roles.reward.close()
    assert [r.line for r in rows] == [47, 0]  # 48 prompts
    means = [float(roles.family.decoder.decode(t.x0[None]).float().mean()) / 255 for t in done]
    # A group of one has no spread, so its reward is scored and counted but teaches nothing.
    assert [t.reward for t in done] == [t.components["mean"] for t in done]
    torch.testing.assert_close(torch.tensor([t.reward for t in done]), torch.tensor(means), rtol=1e-4, atol=1e-5)
    assert commit.metrics["reward/zero_spread_groups"] == 2.0
    assert commit.metrics["reward/mean"] == commit.metrics["train/reward_mean"]
    assert row["forwards/executed"] == row["forwards/planned"] == 2 * 4 + 2 * 2
    assert state.policy_version == state.old_version == 1
    assert server.keys == ["run/1/0/0/1"]


def test_facts_count_the_base_and_the_adapter_apart(profile: Any, control: dist.ProcessGroup) -> None:
    settings = profile("model.lora.rank=4")
    with running(FaultServer()) as server:
        roles = build_roles(spec(settings, server.url), rank=0, device=CPU, control=control)
        roles.reward.close()
    policy = adapters.policy_parameters(roles.family.denoiser)
    layers = adapters.lora_layers(roles.family.denoiser).values()
    sizes = sum(4 * (layer.in_features + layer.out_features) for layer in layers)
    facts = roles.facts()
    assert facts["prompts"] == 48
    assert facts["trained_tensors"] == len(policy) == 32
    assert facts["trained_parameters"] == sizes
    assert facts["adapted_modules"] == dict.fromkeys(["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"], 4)
    names = [n for n, _ in roles.family.denoiser.named_parameters() if "lora_" not in n]
    assert facts["base_parameters"] == sum(roles.family.denoiser.get_parameter(n).numel() for n in names)
    assert {id(p) for p in roles.policy.parameters.values()} == {id(p) for p in policy.values()}


def test_whoever_scores_evaluations_is_the_reward_unless_others_are_named(
    profile: Callable[..., Profile], control: dist.ProcessGroup
) -> None:
    from nftctl.reward.protocol import Item

    image = Item("e/0", "a red one", {}, np.full((8, 8, 3), 51, np.uint8))
    with running(FaultServer()) as server, running(FaultServer()) as judge:
        alone = spec(profile(), server.url)
        roles = build_roles(alone, rank=0, device=CPU, control=control)
        assert roles.judge is roles.reward
        roles.close()
        named = replace(alone, judges=(Endpoint(Provider(name="far", weight=2.0), judge.url, "fault/1"),))
        roles = build_roles(named, rank=0, device=CPU, control=control)
        ((reward, parts),) = roles.judge.score_images([image], "eval")
        roles.close()
    assert (reward, parts["far"]) == (pytest.approx(0.4), pytest.approx(0.2))
    assert (server.requests, judge.requests) == (0, 1)
    assert not any(role._thread.is_alive() for role in (roles.reward, roles.judge))


def test_prompts_that_the_base_cannot_read_are_refused_by_their_lines(
    profile: Callable[..., Profile], control: dist.ProcessGroup, tmp_path: Path
) -> None:
    training, held_out = tmp_path / "train.txt", tmp_path / "test.txt"
    training.write_text("a red one\na red zebra\na blue two\na white two\n")
    held_out.write_text("a pink one\n")
    settings = profile(f'eval.prompt_file="{held_out}"', "rl.guidance=2", 'rl.negative_prompt="blurry"')
    with pytest.raises(ProfileRefused) as refused:
        build_roles(replace(spec(settings, "http://x"), prompt_path=training), rank=0, device=CPU, control=control)
    found = [(f.code, f.key, f.origin, f.line) for f in refused.value.findings]
    assert found == [
        ("prompt-refused", "data.prompt_file", str(training), 2),
        ("prompt-refused", "data.prompt_file", str(training), 4),
        ("prompt-refused", "eval.prompt_file", str(held_out), 1),
        ("prompt-refused", "rl.negative_prompt", "", None),
    ]
    assert 'does not know the word "zebra" (its words are' in refused.value.findings[0].message


def test_of_many_refused_prompts_the_first_are_named(
    profile: Callable[..., Profile], control: dist.ProcessGroup, tmp_path: Path
) -> None:
    training = tmp_path / "train.txt"
    training.write_text("a zebra\n" * 50)
    with pytest.raises(ProfileRefused) as refused:
        build_roles(replace(spec(profile(), "http://x"), prompt_path=training), rank=0, device=CPU, control=control)
    assert [f.line for f in refused.value.findings] == list(range(1, 21))
