"""The five roles of a rank share one model, and are wired to one profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nftctl.engine.worker import WorkerSpec
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
            roles.gather()
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
