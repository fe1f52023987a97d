"""Each rule alone: one departure from a valid profile, exactly that one finding, at its place."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nftctl.algorithm import schedule
from nftctl.errors import ProfileRefused
from nftctl.profile.adapter import adapted, adapter_numbers, checkpoint_bytes
from nftctl.profile.artifacts import EMBEDDED_SETS
from nftctl.profile.estimate import estimate
from nftctl.profile.load import bundled_profiles, load_profile, load_resolved
from nftctl.profile.preflight import RULES, check, place, refuse_if_wrong
from nftctl.profile.rules import objective
from nftctl.profile.rules.rule import Facts, Problem
from nftctl.reward.judgeable import RULE as SCORER_UNFIT

from .conftest import PROVIDER, REMOVED, SD3

TINY: dict[str, object] = {
    "rl.profile": "tiny_t2i_cpu",
    "rl.init_from": "embedded",
    "model.height": 8,
    "model.width": 8,
    "model.dtype": "float32",
    "model.system_prompt": False,
    "model.resolution_template": False,
    "data.prompt_file": "embedded",
}

PARTS = {"model.vae": "base/vae", "model.tokenizer": "base/tokenizer"}
"""What a distributed checkpoint does not hold."""

# code, key, what is changed; several departures may break one rule
ALONE: list[tuple[str, str, dict[str, object]]] = [
    ("grid-backend", "grid.backend", {"grid.backend": "slurm"}),
    ("grid-grouping", "grid.grouping", {"grid.grouping": "per-role"}),
    ("grid-placement", "grid.gpu_placement", {"grid.gpu_placement": "split"}),
    ("gpus-per-role", "grid.gpus_per_role", {"grid.gpus_per_role": 4}),
    ("gpus-per-role", "grid.gpus_per_role", {"grid.gpus_per_role": {"policy": 4}}),
    ("group-size", "rl.group_size", {"rl.group_size": 1}),
    ("group-size", "rl.group_size", {"rl.group_size": 0}),
    ("grid-address", "grid.address", {"grid.address": "ray://head:10001"}),
    ("grid-address", "grid.address", {"grid.address": "head"}),
    ("grid-interface", "grid.interface", {"grid.interface": "eth0 eth1"}),
    ("grid-interface", "grid.interface", {"grid.interface": " "}),
    ("grid-interface", "grid.interface", {"grid.interface": "eth0,eth1"}),
    ("grid-interface", "grid.interface", {"grid.interface": "eth0:1"}),
    ("grid-interface", "grid.interface", {"grid.interface": "a/b"}),
    ("grid-interface", "grid.interface", {"grid.interface": ".."}),
    ("grid-interface", "grid.interface", {"grid.interface": "x" * 16}),
    ("grid-interface-missing", "grid.interface", {"grid.interface": "none-such"}),
    ("shard-group", "grid.shard_group", {"grid.shard_group": 3}),
    ("shard-group", "grid.shard_group", {"grid.shard_group": 8}),
    ("shard-group", "grid.shard_group", {"grid.shard_group": 2, "model.shard": "replicate-base"}),
    ("shard-replicated", "model.shard", {"model.shard": "replicate-base", "model.train": "full"}),
    ("fp8-not-whole", "rl.rollout_precision", {"model.shard": "reshard", "rl.rollout_precision": "fp8"}),
    ("role-shape", "grid.ranks", {"grid.ranks": 8}),
    ("role-shape", "grid.ranks", {"grid.ranks": 4, "rl.group_size": 8}),
    ("role-shape", "grid.num_replicas", {"grid.num_replicas": 2}),
    ("role-shape", "grid.shapes", {"grid.shapes": {"policy": [1, 4]}}),
    ("role-shape", "grid.shapes", {"grid.shapes": {"policy": [1, 4], "rollout": [2, 4]}}),
    ("role-shape", "grid.shapes", {"grid.shapes": {"policy": [1, 4], "rollout": [1, 4], "reward": [1, 4]}}),
    ("role-shape", "grid.ranks", {"grid.shapes": {"policy": [1, 4], "rollout": [1, 4]}, "grid.ranks": 2}),
    ("video-not-in-release", "rl.modality", {"rl.modality": REMOVED}),
    ("video-not-in-release", "rl.modality", {"rl.modality": "video", "rl.profile": "", "model.vae": "base/vae"}),
    ("rl-profile-missing", "rl.profile", {"rl.profile": REMOVED, "model.vae": "base/vae"}),
    ("rl-profile-unknown", "rl.profile", {"rl.profile": "cosmos3_t2i", "model.vae": "base/vae"}),
    ("rl-profile-contradicted", "model.height", {"model.height": 520}),
    ("rl-profile-contradicted", "model.width", {"model.width": 2048}),
    ("rl-profile-contradicted", "rl.sample_steps", {"rl.sample_steps": 101}),
    ("rl-profile-contradicted", "rl.sampler_shift", {"rl.sampler_shift": 0.5}),
    ("rl-profile-contradicted", "rl.guidance", {"rl.guidance": 30}),
    ("rl-profile-contradicted", "model.lora.targets", {"model.lora.targets": ["q_proj_of_another_model"]}),
    ("rl-profile-contradicted", "model.lora.targets", {"model.lora.targets": []}),
    ("rl-profile-contradicted", "model.t5", {"model.t5": False}),
    ("rl-profile-contradicted", "model.tokenizer", {**SD3, "model.tokenizer": "base/tokenizer"}),
    ("rl-profile-contradicted", "model.system_prompt", {**SD3, "model.system_prompt": True}),
    ("rl-profile-contradicted", "model.width", {**SD3, "model.width": 1456}),
    ("rl-profile-contradicted", "model.lora.targets", {**SD3, "model.lora.targets": ["attn.to_out"]}),
    ("shift-for-size", "rl.sampler_shift", {"rl.sampler_shift": 3}),
    ("shift-for-size", "rl.sampler_shift", {"model.height": 256, "model.width": 1024}),
    ("shift-for-size", "rl.sampler_shift", {**SD3, "rl.sampler_shift": 5}),
    ("lora-matches-nothing", "model.lora.targets", {**SD3, "model.lora.targets": ["transformer_blocks.2.attn.to_q"]}),
    ("lora-touches-prompt-encoder", "model.lora.targets", {**SD3, "model.lora.targets": ["self_attn.q_proj"]}),
    ("lora-touches-prompt-encoder", "model.lora.targets", {"model.lora.targets": ["add_q_proj", "to_q"]}),
    ("lora-touches-prompt-encoder", "model.lora.targets", {"model.lora.targets": ["gate_proj"]}),
    ("lora-matches-nothing", "model.lora.targets", {"model.lora.targets": ["layers.2.self_attn.add_q_proj"]}),
    ("lora-matches-nothing", "model.lora.targets", {"model.lora.targets": ["add_q_proj", "time_embedder.linear_1"]}),
    ("lora-matches-nothing", "model.lora.targets", {"model.lora.targets": [r"/layers\.[2-9]\..*\.add_q_proj/"]}),
    ("lora-touches-prompt-encoder", "model.lora.targets", {"model.lora.targets": ["add_q_proj", "/.*_proj/"]}),
    ("lora-touches-prompt-encoder", "model.lora.targets", {**SD3, "model.lora.targets": ["/.*q_proj/"]}),
    ("rl-profile-contradicted", "model.lora.targets", {"model.lora.targets": ["/add_q_proj/"]}),
    ("lora-pattern", "model.lora.targets", {"model.lora.targets": ["/(/"]}),
    ("lora-pattern", "model.lora.targets", {"model.lora.targets": ["add_q_proj", "/proj_in"]}),
    ("lora-pattern", "model.lora.targets", {**SD3, "model.lora.targets": ["//"]}),
    ("init-from-missing", "rl.init_from", {"rl.init_from": REMOVED, "model.vae": "base/vae"}),
    ("init-from-missing", "rl.init_from", {"rl.init_from": "nowhere"}),
    ("init-from-missing", "rl.init_from", {"rl.init_from": "prompts.txt"}),
    ("init-from-missing", "rl.init_from", {"rl.init_from": "base/vae"}),
    ("init-from-missing", "rl.init_from", {"rl.init_from": "a\0b"}),
    ("init-from-missing", "rl.init_from", {"rl.init_from": "n" * 5000}),
    ("init-from-hub", "rl.init_from", {"rl.init_from": "nvidia/Cosmos3-Nano@main"}),
    (
        "init-from-dcp",
        "rl.init_from",
        {"rl.init_from": "dcp", **PARTS},
    ),
    ("init-from-dcp", "rl.init_from", {"rl.init_from": "nameless", **PARTS}),
    ("init-from-weights", "rl.init_from", {"rl.init_from": "torn-shards", **PARTS}),
    ("init-from-family", "rl.init_from", {"rl.init_from": "sd3-shards", **PARTS}),
    ("init-from-missing", "rl.init_from", {"rl.init_from": "base/transformer", **PARTS}),
    ("vae-missing", "model.vae", {"rl.init_from": "shards", "model.tokenizer": "base/tokenizer"}),
    ("tokenizer-missing", "model.tokenizer", {"rl.init_from": "shards", "model.vae": "base/vae"}),
    ("text-encoder-missing", "rl.init_from", {**SD3, "rl.init_from": "sd3-shards"}),
    (
        "lora-matches-nothing",
        "model.lora.targets",
        {"rl.init_from": "shards", **PARTS, "model.lora.targets": ["layers.2.self_attn.add_q_proj"]},
    ),
    ("media-shape", "model.height", {"rl.init_from": "shards", **PARTS, "model.vae": "vae32", "model.height": 528}),
    ("init-from-family", "rl.init_from", {"rl.init_from": "other"}),
    ("init-from-contract", "rl.init_from", {**TINY, "rl.init_from": "embedded:scenes"}),
    ("init-from-weights", "rl.init_from", {"rl.init_from": "hollow"}),
    ("init-from-weights", "rl.init_from", {"rl.init_from": "torn"}),
    ("init-from-weights", "rl.init_from", {"rl.init_from": "half"}),
    ("vae-missing", "model.vae", {"model.vae": "nowhere"}),
    ("vae-missing", "model.vae", {"rl.init_from": "bare", "model.tokenizer": "base/tokenizer"}),
    ("tokenizer-missing", "model.tokenizer", {"rl.init_from": "bare", "model.vae": "base/vae"}),
    ("tokenizer-missing", "model.tokenizer", {"model.tokenizer": "nowhere"}),
    ("tokenizer-missing", "rl.init_from", {**SD3, "rl.init_from": "sd3-mute"}),
    ("text-encoder-missing", "rl.init_from", {**SD3, "rl.init_from": "sd3-deaf"}),
    ("init-from-family", "rl.init_from", {**SD3, "rl.init_from": "base"}),
    ("media-shape", "model.height", {"model.vae": "vae32", "model.height": 528}),
    ("decode-mode", "model.decode_slicing", {**TINY, "model.decode_slicing": True}),
    ("decode-mode", "model.decode_tiling", {**TINY, "model.decode_tiling": True}),
    ("sampler-type", "rl.scheduler_type", {"rl.scheduler_type": "euler"}),
    ("moving-old-cadence", "rl.old.update_every", {"rl.old.update_every": REMOVED}),
    ("moving-old-cadence", "rl.old.update_every", {"rl.old.update_every": 0}),
    ("moving-old-cadence", "rl.old.update_every", {"rl.old.update_every": 3, "rl.updates_per_rollout": 2}),
    ("reference-not-frozen", "rl.ref.update_every", {"rl.ref.update_every": 1}),
    ("advantage-bounds", "rl.advantage_low", {"rl.advantage_low": 0}),
    ("advantage-bounds", "rl.advantage_high", {"rl.advantage_high": -1}),
    ("timestep-law", "rl.uniform_timestep", {"rl.timestep_source": "grid", "rl.uniform_timestep": True}),
    ("timestep-law", "rl.timesteps_per_sample", {"rl.timestep_source": "grid", "rl.timesteps_per_sample": 21}),
    (
        "timestep-law",
        "rl.timesteps_per_sample",
        # the 20 sigmas at shift 5 are 0.9999..., 0.9896, 0.9783, ...: two of them above 0.985
        {"rl.timestep_source": "grid", "rl.timesteps_per_sample": 3, "rl.train_t_range": [0.985, 1.0]},
    ),
    ("timestep-law", "rl.train_t_range", {"rl.train_t_range": [0.5, 0.5]}),
    ("timestep-law", "rl.train_t_range", {"rl.train_t_range": [-0.1, 1]}),
    ("timestep-law", "rl.train_t_range", {"rl.train_t_range": [0, 0.001]}),
    ("timestep-law", "rl.train_t_range", {"rl.train_t_range": [0.9995, 1]}),
    ("max-steps-missing", "rl.max_steps", {"rl.max_steps": REMOVED}),
    ("max-steps-missing", "rl.max_steps", {"rl.max_steps": 0}),
    ("optimizer-betas", "optimizer.betas", {"optimizer.betas": [0.9, 1.0]}),
    ("old-decay-flat", "rl.old.decay", {"rl.old.decay": "delayed"}),
    ("ema-missing", "eval.weights", {"eval.weights": "ema"}),
    ("lora-unused", "model.train", {"model.train": "full", "model.lora.rank": 4}),
    ("guidance-zero", "rl.guidance", {"rl.guidance": 0}),
    ("guidance-zero", "eval.guidance", {"eval.guidance": 0}),
    ("sigmoid-tau", "rl.r_tau", {"rl.r_map": "sigmoid"}),
    ("grid-timeout", "reward.deadline_s", {"reward.deadline_s": 120}),
    ("reward-aggregation", "rl.advantage_std", {"reward.aggregation": "gdpo", "rl.advantage_std": "global"}),
    ("reward-encoding", "reward.jpeg_quality", {"reward.jpeg_quality": 90}),
    ("eval-providers-unused", "eval.providers", {"eval.providers": [PROVIDER]}),
    ("prompt-file-missing", "data.prompt_file", {"data.prompt_file": REMOVED}),
    ("prompt-file-missing", "data.prompt_file", {"data.prompt_file": "nope.txt"}),
    ("prompt-file-missing", "eval.prompt_file", {"eval.prompt_file": "nope.jsonl"}),
    ("prompt-file-invalid", "data.prompt_file", {"data.prompt_file": "prompts.csv"}),
    ("prompt-file-short", "data.rows_per_step", {"data.rows_per_step": 9}),
    ("prompt-duplicate", "data.prompt_file", {"data.prompt_file": "twice.txt"}),
    ("prompt-duplicate", "eval.prompt_file", {"eval.prompt_file": "twice.txt"}),
    (
        "disk-space",
        "checkpoint.keep_last",
        {"rl.max_steps": 10**15, "checkpoint.every": 1, "checkpoint.keep_last": 10**15},
    ),
    ("job-name", "job.name", {"job.name": "../elsewhere"}),
    ("prompt-file-other-set", "data.prompt_file", {**TINY, "data.prompt_file": "embedded:scenes"}),
    ("prompt-file-other-set", "eval.prompt_file", {**TINY, "eval.prompt_file": "embedded:scenes"}),
    ("prompt-word-unknown", "data.prompt_file", {**TINY, "data.prompt_file": "words.txt", "data.rows_per_step": 2}),
    ("prompt-word-unknown", "eval.prompt_file", {**TINY, "eval.prompt_file": "words.txt"}),
    ("prompt-word-unknown", "rl.negative_prompt", {**TINY, "rl.negative_prompt": "a red cat"}),
    ("alarms-stop", "alarms.stop", {"alarms.stop": ["clamp"], "alarms.enabled": False}),
    ("alarms-stop", "alarms.stop", {"alarms.stop": ["reward-hacking"], "eval.prompt_file": "prompts.txt"}),
    ("alarms-stop", "alarms.stop", {"alarms.stop": ["clamp", "reward-hacking"], "eval.every": 5}),
    ("tracker-missing", "logging.wandb", {"logging.wandb": True}),
    ("tracker-missing", "logging.trackio", {"logging.trackio": True}),
    ("tracker-project", "logging.project", {"logging.project": "a/b"}),
    ("tracker-project", "logging.project", {"logging.project": ""}),
]
ALONE_IN_PROVIDER: list[tuple[str, str, list[dict[str, object]]]] = [
    ("reward-missing", "reward.providers", []),
    ("reward-url-missing", "reward.providers.0.url", [{**PROVIDER, "url": REMOVED}]),
    ("reward-url-invalid", "reward.providers.0.url", [{**PROVIDER, "url": "localhost:80"}]),
    ("reward-url-invalid", "reward.providers.0.url", [{**PROVIDER, "url": "http://user:SENTINEL@host"}]),
    ("reward-url-invalid", "reward.providers.0.url", [{**PROVIDER, "url": "http://host:99999"}]),
    ("reward-revision-missing", "reward.providers.0.revision", [{**PROVIDER, "revision": REMOVED}]),
    (
        "reward-revision-missing",
        "reward.providers.1.revision",
        [PROVIDER, {**PROVIDER, "name": "logged", "weight": 0, "revision": " "}],
    ),
    ("reward-scorer-unknown", "reward.providers.0.scorer", [{"name": "a", "kind": "embedded", "scorer": "tiny_digit"}]),
    ("reward-scorer-unknown", "reward.providers.0.scorer", [{"name": "a", "kind": "embedded"}]),
    ("reward-weights", "reward.providers.0.weight", [{**PROVIDER, "weight": 0}]),
    ("reward-names", "reward.providers.1.name", [PROVIDER, PROVIDER]),
    ("reward-names", "reward.providers.0.name", [{**PROVIDER, "name": ""}]),
    ("reward-clip", "reward.providers.0.clip", [{**PROVIDER, "clip": [1, 1]}]),
    ("reward-token", "reward.providers.0.token_env", [{**PROVIDER, "token_env": "NFTCTL_OTHER_TOKEN"}]),
    ("reward-url-invalid", "reward.providers.0.url", [{**PROVIDER, "url": "http://host:8080/api/reward/enqueue"}]),
    ("reward-names", "reward.providers.0.name", [{**PROVIDER, "name": "std"}]),
    ("reward-names", "reward.providers.0.name", [{**PROVIDER, "name": "a/b"}]),
    ("reward-kind", "reward.providers.0.scorer", [{**PROVIDER, "scorer": "brightness"}]),
    (
        "reward-kind",
        "reward.providers.0.url",
        [{"name": "a", "kind": "embedded", "scorer": "brightness", "url": "http://127.0.0.1:8000"}],
    ),
    ("reward-cosmos", "reward.providers.0.score_key", [{**PROVIDER, "score_key": "ocr_reward"}]),
    ("reward-cosmos", "reward.providers.0.reward_fn", [{**PROVIDER, "reward_fn": "ocr"}]),
    ("reward-cosmos", "reward.providers.0.score_key", [{**PROVIDER, "protocol": "cosmos-rl", "score_key": "a+"}]),
    ("reward-cosmos", "reward.providers.0.score_key", [{**PROVIDER, "protocol": "cosmos-rl", "score_key": "a+ a"}]),
    (
        "reward-cosmos",
        "reward.providers.0.protocol",
        [{"name": "a", "kind": "embedded", "scorer": "tiny_digits", "protocol": "cosmos-rl"}],
    ),
]
EMBEDDED: dict[str, object] = {"name": "a", "kind": "embedded", "scorer": "brightness"}
JUDGES: list[tuple[str, str, list[dict[str, object]]]] = [
    ("reward-url-missing", "eval.providers.0.url", [{"name": "a", "revision": "r1"}]),
    ("reward-url-invalid", "eval.providers.1.url", [EMBEDDED, {**PROVIDER, "url": "http://user:SENTINEL@host"}]),
    ("reward-revision-missing", "eval.providers.0.revision", [{**PROVIDER, "revision": ""}]),
    ("reward-scorer-unknown", "eval.providers.0.scorer", [{**EMBEDDED, "scorer": "bright"}]),
    ("reward-weights", "eval.providers.0.weight", [{**PROVIDER, "weight": 0}]),
    ("reward-names", "eval.providers.1.name", [PROVIDER, PROVIDER]),
    ("reward-names", "eval.providers.0.name", [{**PROVIDER, "name": "kl_distance"}]),
    ("reward-names", "eval.providers.0.name", [{**PROVIDER, "name": "reward"}]),
    ("reward-clip", "eval.providers.0.clip", [{**PROVIDER, "clip": [1, 1]}]),
    ("reward-token", "eval.providers.0.token_env", [{**PROVIDER, "token_env": "NFTCTL_OTHER_TOKEN"}]),
    ("reward-cosmos", "eval.providers.0.score_key", [{**PROVIDER, "score_key": "ocr_reward"}]),
    ("reward-kind", "eval.providers.0.scorer", [{**PROVIDER, "scorer": "brightness"}]),
]
"""What providers of evaluations are held to as well."""
TOGETHER = {"video-profile", "skip-keys-video"}  # never without video-not-in-release: tested below


def test_the_complete_profile_is_fine(load: Callable) -> None:
    assert check(load()) == []
    assert refuse_if_wrong(load()) == []


@pytest.mark.parametrize(("code", "key", "changes"), ALONE)
def test_rule_alone(load: Callable, code: str, key: str, changes: dict[str, object]) -> None:
    resolved = load(changes)
    (finding,) = check(resolved)
    assert (finding.code, finding.key) == (code, key)
    if code not in ("prompt-file-invalid", "prompt-duplicate") and "words.txt" not in changes.values():
        assert finding.origin == "profile.toml"
        if changes.get(key, REMOVED) is not REMOVED:
            assert resolved.text.split("\n")[finding.line - 1].startswith(f"{key} = ")
            assert finding.column == 1


@pytest.mark.parametrize(("code", "key", "providers"), ALONE_IN_PROVIDER)
def test_rule_alone_in_providers(load: Callable, code: str, key: str, providers: list[dict[str, object]]) -> None:
    (finding,) = check(load({}, providers))
    assert (finding.code, finding.key) == (code, key)
    assert "SENTINEL" not in finding.message + finding.help


@pytest.mark.parametrize(("code", "key", "providers"), JUDGES)
def test_who_scores_evaluations_is_held_to_the_same_rules(
    load: Callable, code: str, key: str, providers: list[dict[str, object]]
) -> None:
    (finding,) = check(load({"eval.prompt_file": "prompts.txt", "eval.providers": providers}))
    assert (finding.code, finding.key) == (code, key)
    assert "SENTINEL" not in finding.message + finding.help


def test_evaluations_may_be_scored_by_whom_training_is_too(load: Callable) -> None:
    """Names are told apart within a list; those of a step's metrics are free in the other."""
    judges = [PROVIDER, {**PROVIDER, "name": "group_std", "weight": 0}, EMBEDDED]
    assert check(load({"eval.prompt_file": "prompts.txt", "eval.providers": judges})) == []


def test_every_rule_is_tried() -> None:
    tried = {code for code, _, _ in ALONE} | {code for code, _, _ in ALONE_IN_PROVIDER} | TOGETHER
    assert tried == {rule.code for rule in RULES}
    assert len(tried) == len(RULES)


def test_every_rule_gives_its_reason_in_one_sentence() -> None:
    for rule in RULES:
        assert rule.reason[0].isupper()
        assert rule.reason.endswith(".")
        assert "\n" not in rule.reason


def test_an_omitted_modality_is_one_error(load: Callable) -> None:
    (finding,) = check(load({"rl.modality": REMOVED, "rl.init_keys_to_skip_loading": ["x"]}))
    assert (finding.code, finding.help) == ("video-not-in-release", 'rl.modality = "image"')
    assert finding.severity == "error"


def test_video_that_was_asked_for_is_held_to_its_contract(load: Callable) -> None:
    found = check(load({"rl.modality": "video", "rl.init_keys_to_skip_loading": ["x"]}))
    assert {finding.code for finding in found} == {"video-not-in-release", "video-profile", "skip-keys-video"}
    assert len(found) == 3


def test_every_mistake_is_found_at_once_and_sorted(load: Callable) -> None:
    resolved = load(
        {"rl.scheduler_type": "euler", "grid.backend": "slurm", "rl.max_steps": REMOVED, "rl.guidance": 0},
        [{**PROVIDER, "revision": ""}],
        sets=["grid.ranks=2"],
        env={"NFTCTL_RL__GROUP_SIZE": "1"},
    )
    with pytest.raises(ProfileRefused) as caught:
        refuse_if_wrong(resolved)
    found = caught.value.findings
    assert [(f.code, f.line) for f in found if f.line] == [
        ("sampler-type", 6),
        ("grid-backend", 7),
        ("guidance-zero", 8),
        ("reward-revision-missing", 12),
    ]
    assert [(f.code, f.origin) for f in found if not f.line] == [
        ("max-steps-missing", "profile.toml"),
        ("group-size", "env NFTCTL_RL__GROUP_SIZE"),
        ("role-shape", "--set grid.ranks=2"),
    ]
    assert str(caught.value) == "6 errors in the profile"


BROKEN: dict[str, object] = {
    "eval.weights": "ema",
    "model.train": "full",
    "model.shard": "replicate-base",
    "rl.modality": "video",
    "rl.profile": "cosmos3_nft_t2i_public",
    "rl.init_from": "other",
    "rl.init_keys_to_skip_loading": ["x"],
    "rl.group_size": 1,
    "rl.max_steps": 10**15,
    "rl.updates_per_rollout": 2,
    "rl.old.update_every": 3,
    "rl.ref.update_every": 1,
    "rl.advantage_low": 1,
    "rl.r_map": "sigmoid",
    "rl.r_tau": 0.5,
    "rl.train_t_range": [0.5, 0.5],
    "rl.guidance": 0,
    "rl.scheduler_type": "euler",
    "rl.sampler_shift": 3,
    "grid.backend": "slurm",
    "grid.grouping": "per-role",
    "grid.gpu_placement": "split",
    "grid.gpus_per_role": 4,
    "grid.address": "ray://head",
    "grid.interface": "eth0 eth1",
    "grid.shard_group": 2,
    "grid.ranks": 8,
    "model.height": 520,
    "model.vae": "nowhere",
    "model.tokenizer": "nowhere",
    "model.lora.targets": ["add_q_proj", "layers.2.self_attn.add_k_proj", "to_q", "/[/"],
    "data.rows_per_step": 9,
    "data.prompt_file": "twice.txt",
    "optimizer.betas": [1, 1],
    "checkpoint.every": 1,
    "checkpoint.keep_last": 10**15,
    "eval.prompt_file": "prompts.csv",
    "reward.deadline_s": 120,
    "reward.aggregation": "gdpo",
    "reward.jpeg_quality": 90,
    "rl.advantage_std": "global",
    "job.name": "../elsewhere",
    "alarms.enabled": False,
    "alarms.stop": ["clamp"],
    "logging.wandb": True,
    "logging.project": "a/b",
}
"""One fault for every rule that can speak beside the others."""
BROKEN_PROVIDERS: list[dict[str, object]] = [
    {**PROVIDER, "name": "", "weight": 0},
    {**PROVIDER, "name": "no-url", "url": "", "weight": 0},
    {**PROVIDER, "name": "bad-url", "url": "localhost:80", "weight": 0},
    {**PROVIDER, "name": "no-revision", "revision": "", "weight": 0},
    {"name": "unknown", "kind": "embedded", "scorer": "nobody", "weight": 0},
    {**PROVIDER, "name": "clip", "clip": [1, 1], "weight": 0},
    {**PROVIDER, "name": "both", "scorer": "brightness", "weight": 0},
    {**PROVIDER, "name": "token", "token_env": "NFTCTL_OTHER", "weight": 0},
    {**PROVIDER, "name": "key", "score_key": "ocr_reward", "weight": 0},
]
INSTEAD: dict[str, dict[str, object]] = {
    "fp8-not-whole": {"model.shard": "reshard", "rl.rollout_precision": "fp8"},
    "rl-profile-missing": {"rl.modality": "image", "rl.profile": ""},
    "rl-profile-unknown": {"rl.modality": "image", "rl.profile": "cosmos3_t2i"},
    "lora-matches-nothing": {"rl.init_from": "base"},
    "init-from-missing": {"rl.init_from": "nowhere"},
    "init-from-hub": {"rl.init_from": "nvidia/Cosmos3-Nano@main"},
    "init-from-dcp": {"rl.init_from": "dcp"},
    "init-from-weights": {"rl.init_from": "torn"},
    "text-encoder-missing": {**SD3, "rl.init_from": "sd3-deaf"},
    "media-shape": {"rl.init_from": "base", "model.vae": "vae32", "model.height": 528},
    "decode-mode": {"rl.init_from": "embedded", "model.decode_tiling": True},
    "max-steps-missing": {"rl.max_steps": 0},
    "old-decay-flat": {"rl.max_steps": 1, "rl.old.decay": "delayed"},
    "prompt-file-missing": {"eval.prompt_file": "nope.txt"},
    "prompt-file-other-set": {**TINY, "data.prompt_file": "embedded:scenes"},
    "init-from-contract": {**TINY, "rl.init_from": "embedded:scenes"},
    "grid-interface-missing": {"grid.address": "local", "grid.interface": "none-such"},
    "prompt-word-unknown": {**TINY, "data.prompt_file": "words.txt", "model.tokenizer": ""},
    "eval-providers-unused": {"eval.prompt_file": "", "eval.providers": [PROVIDER]},
}
"""Rules whose fault takes the place of another rule's: two answers to one question cannot both be given."""


def codes_at_their_keys(load: Callable, changes: dict[str, object], providers: list[dict[str, object]]) -> set[str]:
    """Codes found; every finding in the profile has to point to the line on which its key is set."""
    resolved = load(changes, providers)
    lines = resolved.text.split("\n")
    found = check(resolved)
    for finding in found:
        if finding.origin == "profile.toml":
            key = finding.key
            if key.startswith("reward.providers."):
                key = key.split(".")[-1]
            assert lines[finding.line - 1].startswith((f"{key} = ", "[[reward.providers]]")), finding
    assert [f.line for f in found if f.origin == "profile.toml"] == sorted(
        f.line for f in found if f.origin == "profile.toml"
    )
    return {finding.code for finding in found}


def test_one_profile_with_a_fault_for_every_rule(load: Callable) -> None:
    found = codes_at_their_keys(load, BROKEN, BROKEN_PROVIDERS)
    assert found == {rule.code for rule in RULES} - set(INSTEAD) - {"reward-missing"}
    assert len(found) >= 33
    for code, changes in INSTEAD.items():
        assert code in codes_at_their_keys(load, {**BROKEN, **changes}, BROKEN_PROVIDERS), code
    assert "reward-missing" in codes_at_their_keys(load, {**BROKEN, "reward.providers": []}, [])


@pytest.mark.parametrize("shift", [5e-324, 1e-300, 1e300])
def test_absurd_shifts_are_refused_and_divide_nothing_by_zero(load: Callable, shift: float) -> None:
    (finding,) = check(load({"rl.sampler_shift": shift, "rl.timestep_source": "grid"}))
    assert finding.key == "rl.sampler_shift"


def test_a_cosmos_service_is_a_provider_and_sends_no_encoded_images(load: Callable) -> None:
    service = {**PROVIDER, "protocol": "cosmos-rl", "reward_fn": "gen_eval", "score_key": "gen_eval_score + ocr_reward"}
    assert not check(load(providers=[service]))
    (finding,) = check(load({"reward.encoding": "jpeg", "reward.jpeg_quality": 80}, [service]))
    assert (finding.code, finding.key, finding.severity) == ("reward-encoding", "reward.encoding", "warning")
    assert not check(load({"reward.encoding": "jpeg", "reward.jpeg_quality": 80}))


TINY_WORDS = "a, red, green, blue, yellow, purple, black, zero, one, two, three, four, five, six, seven, eight, nine"


def test_words_that_the_base_lacks_are_told_line_by_line_and_its_own_once(load: Callable) -> None:
    lines = ["a red seven", "a mauve seven of nine", "", "A red seven", *(f"thing {n}" for n in range(30))]
    Path("mine.txt").write_text("\n".join(line or "a blue one" for line in lines) + "\n")
    first, *more, last = check(load({**TINY, "data.prompt_file": "mine.txt"}))
    place = (first.code, first.key, first.origin, first.line)
    assert place == ("prompt-word-unknown", "data.prompt_file", "mine.txt", 2)
    assert first.message == '"mauve", "of" are no words that the base\'s tokenizer knows'
    assert first.help == f"its words are {TINY_WORDS}"
    assert [(f.line, f.help) for f in more] == [(line, "") for line in (4, *range(5, 23))]
    assert more[0].message == '"A" is no word that the base\'s tokenizer knows'
    assert (last.line, last.message.split()[0]) == (None, "12")


def test_a_wrong_line_hides_no_unknown_word_of_another(load: Callable) -> None:
    Path("mine.jsonl").write_text('{"prompt": "a red zebra"}\nnot JSON\n{"prompt": "a mauve two"}\n')
    found = check(load({**TINY, "data.prompt_file": "mine.jsonl", "data.rows_per_step": 2}))
    assert [(f.code, f.line) for f in found] == [
        ("prompt-word-unknown", 1), ("prompt-file-invalid", 2), ("prompt-word-unknown", 3),
    ]  # fmt: skip


def test_a_packaged_base_has_one_cure_under_another_family() -> None:
    """And a packaged set is offered only where the contract has one."""

    def found(*sets: str) -> dict[str, str]:
        resolved = load_profile(bundled_profiles()["sd35m_nft_paper"], sets=sets, env={})
        return {finding.code: finding.help for finding in check(resolved)}

    packaged = found("rl.init_from=embedded")
    assert packaged["init-from-contract"] == "name a base of your own; or begin with the bundled profile tiny_t2i_cpu"
    assert "init-from-family" not in packaged
    for cures in (found(), found("rl.profile=nothing")):
        assert cures["init-from-missing"] == "the folder of a base in diffusers layout"
        assert cures["prompt-file-missing"] == "a .txt or .jsonl file"
    tiny = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=["rl.init_from=", "data.prompt_file="], env={})
    assert [f.help.endswith(", or `embedded`") for f in check(tiny)] == [True, True]


@pytest.mark.parametrize(
    ("setting", "codes"),
    [
        ("rl.profile=scenes_t2i_cpu", {"rl-profile-contradicted", "reward-scorer-unfit"}),
        ("model.height=9", {"rl-profile-contradicted", "reward-scorer-unfit"}),
        ("rl.modality=video", {"video-not-in-release", "video-profile"}),
        ("reward.providers.0.kind=http", {"reward-url-missing", "reward-revision-missing", "reward-kind"}),
    ],
)
def test_what_a_setting_beside_the_profile_made_wrong_is_found_at_the_setting(setting: str, codes: set[str]) -> None:
    """Whatever key the rule is about: the packaged profile is nobody's to edit."""
    found = check(load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=[setting], env={}), (*RULES, SCORER_UNFIT))
    assert {(f.code, f.origin, f.line) for f in found} == {(code, f"--set {setting}", None) for code in codes}


def test_a_setting_comes_before_a_packaged_profile_and_after_ones_own(load: Callable) -> None:
    settings = ["rl.max_steps=0", "data.rows_per_step=100"]
    tiny = bundled_profiles()["tiny_t2i_cpu"]
    Path("mine.toml").write_text('extends = "tiny_t2i_cpu"\n[model]\nheight = 9\n')
    own = check(load_profile(Path("mine.toml"), sets=settings, env={}))
    assert [f.origin.partition("=")[0] for f in own] == [
        "mine.toml", "--set rl.max_steps", "--set data.rows_per_step",
    ]  # fmt: skip
    resolved = load_profile(tiny, sets=settings, env={})
    key = Problem("rl.seed", "wrong")
    placed = place(resolved, [("x", "error", key), ("y", "error", Problem("rl.max_steps", "wrong"))])
    assert [f.code for f in placed] == ["y", "x"]


def test_a_negative_prompt_that_nobody_reads_may_have_any_word(load: Callable) -> None:
    unread = {**TINY, "rl.negative_prompt": "a red cat", "rl.guidance": 1.0}
    assert check(load(unread)) == []
    assert check(load({**unread, "eval.guidance": 1.0})) == []
    (finding,) = check(load({**unread, "eval.guidance": 2.0}))
    assert finding.message == 'rl.negative_prompt: "cat" is no word that the base\'s tokenizer knows'


def test_a_base_of_the_same_kind_is_held_to_its_own_words(load: Callable) -> None:
    base = shutil.copytree(EMBEDDED_SETS["digits"] / "base", Path("mine"))
    tokenizer = json.loads((base / "tokenizer" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["mauve"] = 21
    (base / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    Path("mine.txt").write_text("".join(f"a mauve {word}\n" for word in TINY_WORDS.split(", ")[7:]))
    own = {**TINY, "rl.init_from": "mine", "data.prompt_file": "mine.txt"}
    assert check(load(own)) == []
    named = {**own, "rl.init_from": "embedded", "model.tokenizer": "mine/tokenizer"}
    assert check(load(named)) == []
    assert {f.code for f in check(load({**named, "model.tokenizer": ""}))} == {"prompt-word-unknown"}
    (first, *_) = check(load({**named, "data.prompt_file": "prompts.txt"}))
    assert first.help.endswith("nine, mauve")
    # One with a token for the unknown takes any word.
    tokenizer["model"]["unk_token"] = "mauve"
    (base / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert check(load({**own, "data.prompt_file": "prompts.txt"})) == []


def test_a_packaged_base_under_another_contract_is_asked_for_nothing_else() -> None:
    scenes, sets = bundled_profiles()["scenes_t2i_cpu"], ["rl.init_from=embedded:digits"]
    (finding,) = check(load_profile(scenes, sets=sets, env={}))
    assert (finding.code, finding.key) == ("init-from-contract", "rl.init_from")
    assert finding.message == (
        'rl.init_from = "embedded:digits" is the packaged base of digits, made for rl.profile = "tiny_t2i_cpu", and '
        'this profile has rl.profile = "scenes_t2i_cpu"'
    )
    assert finding.help == 'rl.init_from = "embedded:scenes"; or begin with the bundled profile tiny_t2i_cpu'


@pytest.mark.parametrize(
    ("changes", "help"),
    [
        ({"model.height": 520}, "the nearest is model.height = 512"),
        ({"model.width": 2048}, "the nearest is model.width = 1024"),
        ({"rl.sample_steps": 101}, "the nearest is rl.sample_steps = 100"),
        ({"rl.sampler_shift": 0.5}, "the nearest is rl.sampler_shift = 1"),
        ({**TINY, "model.dtype": "bfloat16"}, 'model.dtype = "float32"'),
        ({**TINY, "model.system_prompt": True}, "model.system_prompt = false"),
        ({"model.t5": False}, "remove the key"),
        ({**SD3, "model.tokenizer": "base/tokenizer"}, "remove the key"),
    ],
)
def test_what_a_contract_allows_is_said_with_the_way_there(
    load: Callable, changes: dict[str, object], help: str
) -> None:
    (finding,) = check(load(changes))
    assert (finding.code, finding.help) == ("rl-profile-contradicted", help)


def test_an_interface_is_looked_for_only_where_the_ranks_will_be(
    load: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "bond0")])
    assert check(load({"grid.interface": "bond0"})) == []
    assert check(load({"grid.interface": "ib0", "grid.address": "10.0.0.1:6379"})) == []
    (finding,) = check(load({"grid.interface": "ib0"}))
    assert finding.message == 'grid.interface = "ib0" is not on this machine, where the run starts a Ray of its own'
    assert finding.help == "there are lo, bond0; or remove the key"


def test_warnings_alone_refuse_nothing(load: Callable) -> None:
    found = refuse_if_wrong(load({"rl.guidance": 0, "rl.r_map": "sigmoid"}))
    assert [(f.code, f.severity) for f in found] == [("guidance-zero", "warning"), ("sigmoid-tau", "warning")]
    assert refuse_if_wrong(load({"rl.r_map": "sigmoid", "rl.r_tau": 2.5})) == []


def test_adapter_settings_without_an_adapter_are_counted_by_the_verb(load: Callable) -> None:
    (one,) = check(load({"model.train": "full", "model.lora.rank": 4}))
    (two,) = check(load({"model.train": "full", "model.lora.rank": 4, "model.lora.alpha": 8}))
    assert one.message.endswith("so model.lora.rank has no effect")
    assert two.message.endswith("so model.lora.rank, model.lora.alpha have no effect")
    assert two.help == 'remove model.lora, or set model.train = "lora"'


def test_a_distributed_checkpoint_lacks_vae_and_tokenizer(load: Callable) -> None:
    codes = {finding.code for finding in check(load({"rl.init_from": "dcp"}))}
    assert codes == {"init-from-dcp", "vae-missing", "tokenizer-missing"}
    (pickled,) = check(load({"rl.init_from": "dcp", **PARTS}))
    assert "only nftctl convert has the reader" in pickled.message
    assert pickled.help.startswith("nftctl convert dcp dcp-diffusers --like BASE, where BASE is the base")
    Path("dcp/.metadata").unlink()
    assert [finding.code for finding in check(load({"rl.init_from": "dcp"}))] == ["init-from-missing"]
    codes = {finding.code for finding in check(load({"rl.init_from": "shards"}))}
    assert codes == {"vae-missing", "tokenizer-missing"}


def test_a_distributed_checkpoint_of_safetensors_is_a_base(load: Callable) -> None:
    assert check(load({"rl.init_from": "shards", **PARTS})) == []
    whole, cut = (Facts(load({"rl.init_from": name, **PARTS})) for name in ("base", "shards"))
    assert cut.weights.shapes == whole.weights.shapes
    memory = [estimate(f.profile, f.base, f.weights, f.contract, ["a"]) for f in (whole, cut) if f.contract]
    assert memory[0] is not None
    assert memory[0] == memory[1]
    Path("shards/transformer/config.json").rename("shards/config.json")
    assert check(load({"rl.init_from": "shards", **PARTS})) == []
    assert [(f.code, f.key) for f in check(load({**SD3, "rl.init_from": "sd3-shards"}))] == [
        ("text-encoder-missing", "rl.init_from")
    ]


def test_a_checkpoint_needs_no_vae_where_the_contract_s_latents_are_pixels(load: Callable) -> None:
    changes = {**TINY, "rl.init_from": "shards", "model.tokenizer": "base/tokenizer"}
    assert [f.code for f in check(load(changes))] == ["vae-missing"]
    config = json.loads(Path("shards/transformer/config.json").read_text())
    Path("shards/transformer/config.json").write_text(json.dumps(config | {"latent_channel": 3}))
    assert check(load(changes)) == []
    assert [f.code for f in check(load({**changes, "model.decode_tiling": True}))] == ["decode-mode"]


def test_the_unknown_contract_lists_the_supported_ones(load: Callable) -> None:
    (finding,) = check(load({"rl.profile": "tiny_t2i", "model.vae": "base/vae"}))
    assert finding.help == (
        "did you mean tiny_t2i_cpu? supported: tiny_t2i_cpu, scenes_t2i_cpu, cosmos3_nft_t2i_public, "
        "cosmos3_nft_t2i_public_2gpu, cosmos3_nft_t2i_public_4gpu, sd35m_nft_paper, sd35m_nft_paper_2gpu"
    )


def test_a_base_of_another_family_is_told_which_contracts_fit_it(load: Callable) -> None:
    (finding,) = check(load({"rl.init_from": "sd3"}))
    assert finding.code == "init-from-family"
    assert finding.help == "for this base rl.profile is one of sd35m_nft_paper, sd35m_nft_paper_2gpu"


def test_a_base_makes_no_image_larger_than_its_table_of_positions(load: Callable) -> None:
    """Sixteen pixels a patch: 24 positions are 384 pixels."""
    config = json.loads(Path("sd3/transformer/config.json").read_text())
    Path("sd3/transformer/config.json").write_text(json.dumps({**config, "pos_embed_max_size": 24}))
    (finding,) = check(load({**SD3, "model.height": 384, "model.width": 400}))
    assert (finding.code, finding.key) == ("media-shape", "model.width")
    assert "384 pixels at most" in finding.message


def test_t5_may_be_absent_or_switched_off_and_not_just_lost(load: Callable) -> None:
    assert check(load(SD3)) == []
    assert check(load({**SD3, "rl.init_from": "sd3-bare"})) == []
    Path("sd3-bare/model_index.json").write_text("{}")
    found = check(load({**SD3, "rl.init_from": "sd3-bare"}))
    assert {finding.code for finding in found} == {"text-encoder-missing", "tokenizer-missing"}
    assert "model.t5 = false runs without it" in {finding.help for finding in found}
    assert check(load({**SD3, "rl.init_from": "sd3-bare", "model.t5": False})) == []


@pytest.mark.parametrize(
    ("height", "width", "own"),
    [
        *((256, 256, 3), (1024, 256, 3), (352, 368, 3), (368, 1024, 3)),
        *((384, 384, 5), (480, 832, 5), (592, 592, 5)),
        *((608, 608, 10), (720, 720, 10), (1024, 1024, 10)),
    ],
)
def test_the_shift_that_belongs_to_a_size(load: Callable, height: int, width: int, own: float) -> None:
    """By the nearest of 256, 480 and 720; half-way, at 368, the smaller."""
    for shift in (3.0, 5.0, 10.0):
        found = check(load({"model.height": height, "model.width": width, "rl.sampler_shift": shift}))
        assert [f.code for f in found] == ([] if shift == own else ["shift-for-size"])
        assert all(f"{own:g} for a short side" in f.message and f.severity == "warning" for f in found)


def test_the_tiny_contract_knows_its_own_limits(load: Callable) -> None:
    tiny = {"rl.profile": "tiny_t2i_cpu", "model.height": 8, "model.width": 16}
    found = check(load(tiny))
    assert [(f.code, f.key) for f in found] == [
        ("rl-profile-contradicted", "model.width"),
        ("rl-profile-contradicted", "model.dtype"),
        ("rl-profile-contradicted", "model.system_prompt"),
        ("rl-profile-contradicted", "model.resolution_template"),
    ]


def test_wrong_lines_of_a_prompt_file_are_shown_where_they_are(load: Callable) -> None:
    rows = [json.dumps({"prompt": f"p{n}"}) for n in range(5)]
    rows[2] = "a plain sentence"
    Path("rows.jsonl").write_text("\n".join(rows))
    (finding,) = check(load({"data.prompt_file": "rows.jsonl"}))
    assert (finding.code, finding.key) == ("prompt-file-invalid", "data.prompt_file")
    assert (finding.origin, finding.line) == ("rows.jsonl", 3)


def test_explicit_shapes_and_ranks_that_agree_are_fine(load: Callable) -> None:
    assert check(load({"grid.shapes": {"policy": [1, 4], "rollout": [1, 4]}, "grid.ranks": 4})) == []


def test_without_an_old_policy_no_cadence_is_needed(load: Callable) -> None:
    assert check(load({"rl.old.build_old": False, "rl.old.update_every": REMOVED})) == []


def test_weight_zero_beside_another_provider_is_fine(load: Callable) -> None:
    assert check(load({}, [PROVIDER, {**PROVIDER, "name": "logged", "weight": 0}])) == []


def test_lora_targets_are_judged_by_the_names_in_the_headers(load: Callable) -> None:
    """In one file, in two, and in the embedded base; the help lists what there is."""
    (finding,) = check(load({"model.lora.targets": ["layers.2.self_attn.add_q_proj"]}))
    assert "self_attn.add_q_proj" in finding.help
    assert "proj_in, proj_out; layers 0 to 1" in finding.help
    assert "to_q" not in finding.help
    assert (
        check(load({"rl.init_from": "split", "model.lora.targets": ["layers.1.self_attn.add_q_proj", "proj_in"]})) == []
    )
    (finding,) = check(load({"rl.init_from": "split", "model.lora.targets": ["layers.2.self_attn.add_q_proj"]}))
    assert finding.code == "lora-matches-nothing"
    assert (
        check(load({"model.lora.targets": [r"/layers\.1\.self_attn\.(add_q_proj|to_add_out)/", "/proj_(in|out)/"]}))
        == []
    )
    (finding,) = check(load({"model.lora.targets": ["proj_in", r"/layers\.\d\..*gate_proj/"]}))
    assert "selects layers.0.mlp.gate_proj of the prompt encoder" in finding.message
    (finding,) = check(load({"model.lora.targets": ["/layers.0.*(add/"]}))
    assert "missing ), unterminated subpattern at position 10" in finding.message
    for layer, codes in ((3, []), (4, ["lora-matches-nothing"])):
        path = bundled_profiles()["tiny_t2i_cpu"]
        sets = [f'model.lora.targets=["layers.{layer}.mlp_moe_gen.up_proj"]']
        assert [f.code for f in check(load_profile(path, sets=sets, env={}))] == codes


def test_a_repeated_prompt_is_told_once_with_its_line(load: Callable) -> None:
    (finding,) = check(load({"data.prompt_file": "twice.txt"}))
    assert (finding.origin, finding.line, finding.severity) == ("twice.txt", 4, "warning")
    assert finding.message == "line 4 is line 2 again, and 1 more lines repeat one"
    rows = [
        {"prompt": "a"},
        {"prompt": "a", "metadata": {"n": 1}},
        {"prompt": "a", "reward_prompt": "b"},
        {"prompt": "c"},
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert check(load({"data.prompt_file": "rows.jsonl"})) == []


def test_the_delayed_law_may_set_in_at_the_last_step(load: Callable) -> None:
    delayed = {"rl.old.decay": "delayed", "rl.updates_per_rollout": 2, "rl.old.update_every": 2}
    assert [f.code for f in check(load({**delayed, "rl.max_steps": 37}))] == ["old-decay-flat"]
    assert check(load({**delayed, "rl.max_steps": 38})) == []
    assert check(load({"rl.old.decay": "delayed", "rl.old.build_old": False})) == []


@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_run_that_goes_on_needs_no_room_for_what_it_has_already(
    load: Callable, monkeypatch: pytest.MonkeyPatch, train: str
) -> None:
    resolved = load(
        {"rl.max_steps": 500, "checkpoint.every": 1, "checkpoint.keep_last": 100, "model.train": train}
        | ({"model.lora.targets": REMOVED, "model.lora.rank": REMOVED} if train == "full" else {})
    )
    facts = Facts(resolved)
    modules = adapted(resolved.profile.model.lora.targets, facts.denoiser_modules)
    mine = ("add_", "norm_added_", "_moe_gen", "proj_in.", "proj_out.", "time_embedder.")
    own = {name: shape for name, shape in facts.weights.shapes.items() if any(part in name for part in mine)}
    sizes = {
        "lora": (2 * len(modules), adapter_numbers(modules, resolved.profile.model.lora.rank)),
        "full": (len(own), sum(map(math.prod, own.values()))),
    }
    each = checkpoint_bytes(resolved.profile, *sizes[train])
    asked: list[Path] = []

    def room(for_checkpoints: int) -> None:
        usage = SimpleNamespace(free=for_checkpoints * each)
        monkeypatch.setattr("shutil.disk_usage", lambda path: asked.append(path) or usage)

    room(100)  # the hundred that are kept, and one more while it is written
    (finding,) = check(resolved)
    assert finding.code == "disk-space"
    assert finding.message.startswith("up to 101 checkpoints of ")
    assert asked == [Path.cwd()]
    room(101)
    assert check(resolved) == []
    room(2)
    document = resolved.profile.model_dump()
    assert check(load_resolved(document, name="x", text="", env={})) == []
    room(1)
    assert [f.code for f in check(load_resolved(document, name="x", text="", env={}))] == ["disk-space"]


def test_preflight_knows_the_numbers_of_the_algorithm() -> None:
    assert objective.TIME_FLOOR == schedule.TIME_FLOOR
    assert schedule.old_share("delayed", objective.DELAYED_UNTIL) == 0.0
    assert schedule.old_share("delayed", objective.DELAYED_UNTIL + 1) > 0.0
    for steps, shift in ((20, 5.0), (10, 3.0), (1, 1.0)):
        assert objective.sigmas(steps, shift) == pytest.approx(schedule.sigmas(steps, shift)[:-1], abs=1e-7)


def test_too_few_prompts_are_found_at_the_file_that_was_typed(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("red 1\nblue 2\n")
    file = f'data.prompt_file="{tmp_path / "few.txt"}"'
    resolved = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=[file], env={})
    (finding,) = [finding for finding in check(resolved) if finding.code == "prompt-file-short"]
    assert "data.prompt_file" in str(finding.origin)
    assert finding.help
