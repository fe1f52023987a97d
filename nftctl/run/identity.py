"""What makes two runs the same run: the seed contract, the run identity, and the readable difference between two.

Both are flat documents of dotted keys. Everything in a profile belongs to the identity unless it is listed below as
unable to change a result; files count by content, never by path. Refuses numbers that are not finite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nftctl.errors import Difference
from nftctl.run.canonical import canonical_bytes, digest

GENERATOR_VERSION = 1
"""Version of the rule that turns (seed, purpose, indices) into random numbers. Raise it when the rule changes."""

ABSENT = "(absent)"
"""What a difference shows for a key that one side does not have."""

OUTSIDE_SECTIONS = ("checkpoint", "logging", "samples", "eval", "alarms")
"""Sections that only say what is written down, when, and when to end for it."""

OUTSIDE_KEYS = frozenset({
    "job.name", "job.run_dir", "rl.max_steps", "grid.address", "grid.collective_timeout_s",
    "grid.strategy", "grid.interface", "grid.shard_group", "grid.restart_wait_s",
    "model.shard", "model.compile", "model.cuda_graphs", "model.gradient_checkpointing", "model.prompt_encoder",
    "reward.deadline_s", "reward.connect_timeout_s", "reward.read_timeout_s", "reward.retries",
    # Paths: the content hashes below stand in for them.
    "rl.init_from", "model.vae", "model.tokenizer", "data.prompt_file",
})  # fmt: skip
"""Keys that name a place, a time-out or a memory policy."""

OUTSIDE_PROVIDER_KEYS = frozenset({"url", "token_env"})

SEED_KEYS = (
    "rl.seed", "rl.rollout_seed_clock", "rl.group_size", "rl.scheduler_type", "rl.sample_steps", "rl.sampler_shift",
    "rl.guidance", "rl.negative_prompt", "rl.modality", "model.height", "model.width", "data.rows_per_step",
    "data.shuffle",
)  # fmt: skip
"""Profile keys that fix which noise meets which prompt, and how noise becomes a sample."""

SOLVER = {"sampler.order": 2, "sampler.solver": "bh2"}
"""Properties of the one sampler, written down so that another solver could never pass for it."""

WHY = {
    "rl.seed": "root of every random number",
    "rl.rollout_seed_clock": "decides which noise each row gets",
    "rl.group_size": "samples per prompt and number of ranks",
    "rl.scheduler_type": "turns noise into samples",
    "rl.sample_steps": "turns noise into samples",
    "rl.sampler_shift": "turns noise into samples",
    "rl.guidance": "turns noise into samples",
    "rl.negative_prompt": "turns noise into samples",
    "rl.modality": "decides what is generated",
    "rl.profile": "names the model contract",
    "rl.init_keys_to_skip_loading": "changes the weights that training began from",
    "rl.updates_per_rollout": "changes the objective's schedule",
    "rl.old": "changes the policy that samples and anchors",
    "rl.ref": "changes the reference",
    "rl": "changes the objective",
    "model.height": "changes the shape of the noise",
    "model.width": "changes the shape of the noise",
    "model.lora": "changes the trained parameters",
    "model.rollout_micro_batch": "changes the order of floating-point sums",
    "model.train_micro_batch": "changes the order of floating-point sums",
    "model.vae_hash": "other decoder weights",
    "model.tokenizer_hash": "other tokens",
    "model": "changes what the model computes",
    "data.prompt_hash": "other prompts or another order",
    "data": "decides which prompt each step reads",
    "base.fingerprint": "training began from other weights",
    "reward": "changes the reward",
    "optimizer": "changes the update",
    "grid": "changes where and how ranks compute",
    "job.deterministic": "changes the kernels",
    "sampler": "turns noise into samples",
    "generator_version": "the rule of random numbers changed",
}
"""Why a key is part of the identity, by key or by the longest prefix that is listed."""


def seed_contract(profile: Mapping[str, Any], *, prompt_hash: str) -> dict[str, object]:
    """The part of the identity that fixes sampling. `profile` is `Profile.model_dump()`."""
    values = dict(_leaves(profile, ""))
    document: dict[str, object] = {key: values[key] for key in SEED_KEYS}
    return document | SOLVER | {"data.prompt_hash": prompt_hash, "generator_version": GENERATOR_VERSION}


def identity_document(
    profile: Mapping[str, Any],
    *,
    base_fingerprint: str,
    prompt_hash: str,
    vae_hash: str = "",
    tokenizer_hash: str = "",
    revisions: Mapping[str, str],
    lora_modules: Mapping[str, int] | None = None,
) -> dict[str, object]:
    """Every resolved value that can change a result, under its dotted key, with hashes in place of paths.

    `revisions` maps a provider's name to what it really serves: the pinned revision of a service, the content hash of
    an embedded scorer. It wins over the profile's own `revision`. `lora_modules` says how many modules of the base each
    LoRA target selects, where an adapter is trained. The seed contract is contained in the document.
    """
    document = {
        key: value
        for key, value in _leaves({k: v for k, v in profile.items() if k != "reward"}, "")
        if key not in OUTSIDE_KEYS and key.partition(".")[0] not in OUTSIDE_SECTIONS
    }
    document |= _reward_part(profile["reward"], revisions)
    document |= seed_contract(profile, prompt_hash=prompt_hash)
    document["base.fingerprint"] = base_fingerprint
    document["model.vae_hash"] = vae_hash
    document["model.tokenizer_hash"] = tokenizer_hash
    if profile["model"]["train"] == "full" and profile["grid"]["shard_group"]:
        # Gradients of all weights are then added up in another order; a frozen base is only gathered.
        document["grid.shard_group"] = profile["grid"]["shard_group"]
    if lora_modules is not None:
        document["model.lora.modules"] = dict(lora_modules)
    return dict(sorted(document.items()))


def fingerprint(document: Mapping[str, object]) -> str:
    """sha256 over the canonical form, 64 hex digits. Raises ValueError on NaN and infinities."""
    return digest(document)


def differences(was: Mapping[str, object], now: Mapping[str, object]) -> list[Difference]:
    """Every key whose value is not the same in both documents, sorted, each with the reason why it matters."""
    return [
        Difference(key, was.get(key, ABSENT), now.get(key, ABSENT), why(key))
        for key in sorted(set(was) | set(now))
        if (key in was) != (key in now) or canonical_bytes(was[key]) != canonical_bytes(now[key])
    ]


def why(key: str) -> str:
    """Why a change of `key` makes another run."""
    parts = key.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((WHY[prefix] for prefix in prefixes if prefix in WHY), "part of the run's identity")


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    """Dotted leaves. An empty mapping is a leaf, so that it differs from an unset one."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _reward_part(reward: Mapping[str, Any], revisions: Mapping[str, str]) -> dict[str, object]:
    settings = {k: v for k, v in reward.items() if k != "providers" and f"reward.{k}" not in OUTSIDE_KEYS}
    document = dict(_leaves(settings, "reward."))
    providers = reward["providers"]
    # The order decides how weighted scores are summed, so it counts as well.
    document["reward.providers"] = [p["name"] for p in providers]
    repeated = {name for name, count in Counter(p["name"] for p in providers).items() if count > 1}
    for index, provider in enumerate(providers):
        name = provider["name"]
        inside = {k: v for k, v in provider.items() if k not in OUTSIDE_PROVIDER_KEYS}
        inside["revision"] = revisions.get(name, provider["revision"])
        label = f"{name}[{index}]" if name in repeated else name
        document |= dict(_leaves(inside, f"reward.providers.{label}."))
    return document
