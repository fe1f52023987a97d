"""The schema made readable: a JSON Schema for editors, and one entry per key for the reference page.

Both are generated from schema.py, whose docstrings are the texts. Owns the one table that the schema cannot give: which
keys each rule of preflight judges. Refuses a rule that the table does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nftctl.profile.diagnose import variable
from nftctl.profile.keys import Path, dotted, leaves
from nftctl.profile.schema import Profile

DIALECT = "https://json-schema.org/draft/2020-12/schema"

JUDGED: dict[str, tuple[str, ...]] = {
    "grid-backend": ("grid.backend",),
    "grid-grouping": ("grid.grouping",),
    "grid-placement": ("grid.gpu_placement",),
    "gpus-per-role": ("grid.gpus_per_role",),
    "group-size": ("rl.group_size",),
    "grid-address": ("grid.address",),
    "grid-interface": ("grid.interface",),
    "grid-interface-missing": ("grid.interface",),
    "role-shape": ("grid.ranks", "grid.num_replicas", "grid.shapes"),
    "video-not-in-release": ("rl.modality",),
    "video-profile": ("rl.profile",),
    "skip-keys-video": ("rl.init_keys_to_skip_loading",),
    "rl-profile-missing": ("rl.profile",),
    "rl-profile-unknown": ("rl.profile",),
    "rl-profile-contradicted": (
        "model.height", "model.width", "rl.sample_steps", "rl.sampler_shift", "rl.guidance", "model.dtype",
        "model.system_prompt", "model.resolution_template", "model.tokenizer", "model.t5", "model.lora.targets",
    ),
    "shift-for-size": ("rl.sampler_shift",),
    "lora-pattern": ("model.lora.targets",),
    "lora-matches-nothing": ("model.lora.targets",),
    "lora-touches-prompt-encoder": ("model.lora.targets",),
    "lora-unused": ("model.train",),
    "init-from-missing": ("rl.init_from",),
    "init-from-hub": ("rl.init_from",),
    "init-from-dcp": ("rl.init_from",),
    "init-from-family": ("rl.init_from",),
    "init-from-contract": ("rl.init_from",),
    "init-from-weights": ("rl.init_from",),
    "vae-missing": ("model.vae",),
    "media-shape": ("model.height", "model.width"),
    "decode-mode": ("model.decode_slicing", "model.decode_tiling"),
    "text-encoder-missing": ("rl.init_from",),
    "tokenizer-missing": ("model.tokenizer", "rl.init_from"),
    "sampler-type": ("rl.scheduler_type",),
    "moving-old-cadence": ("rl.old.update_every",),
    "old-decay-flat": ("rl.old.decay",),
    "reference-not-frozen": ("rl.ref.update_every",),
    "advantage-bounds": ("rl.advantage_low", "rl.advantage_high"),
    "timestep-law": ("rl.train_t_range", "rl.timesteps_per_sample", "rl.uniform_timestep"),
    "ema-missing": ("eval.weights",),
    "shard-group": ("grid.shard_group",),
    "shard-replicated": ("model.shard",),
    "fp8-not-whole": ("rl.rollout_precision", "model.shard"),
    "max-steps-missing": ("rl.max_steps",),
    "optimizer-betas": ("optimizer.betas",),
    "guidance-zero": ("rl.guidance", "eval.guidance"),
    "sigmoid-tau": ("rl.r_tau",),
    "reward-missing": ("reward.providers",),
    "reward-url-missing": ("reward.providers.0.url", "eval.providers.0.url"),
    "reward-url-invalid": ("reward.providers.0.url", "eval.providers.0.url"),
    "reward-revision-missing": ("reward.providers.0.revision", "eval.providers.0.revision"),
    "reward-scorer-unknown": ("reward.providers.0.scorer", "eval.providers.0.scorer"),
    "reward-scorer-unfit": ("reward.providers.0.scorer", "eval.providers.0.scorer"),
    "reward-weights": ("reward.providers.0.weight", "eval.providers.0.weight"),
    "reward-names": ("reward.providers.0.name", "eval.providers.0.name"),
    "reward-clip": ("reward.providers.0.clip", "eval.providers.0.clip"),
    "reward-token": ("reward.providers.0.token_env", "eval.providers.0.token_env"),
    "reward-cosmos": (
        "reward.providers.0.protocol", "reward.providers.0.reward_fn", "reward.providers.0.score_key",
        "eval.providers.0.protocol", "eval.providers.0.reward_fn", "eval.providers.0.score_key",
    ),
    "reward-kind": (
        "reward.providers.0.kind", "reward.providers.0.url", "reward.providers.0.scorer",
        "eval.providers.0.kind", "eval.providers.0.url", "eval.providers.0.scorer",
    ),
    "reward-aggregation": ("rl.advantage_std",),
    "reward-encoding": ("reward.encoding", "reward.jpeg_quality"),
    "eval-providers-unused": ("eval.providers",),
    "grid-timeout": ("reward.deadline_s",),
    "prompt-file-missing": ("data.prompt_file", "eval.prompt_file"),
    "prompt-file-invalid": ("data.prompt_file", "eval.prompt_file"),
    "prompt-file-other-set": ("data.prompt_file", "eval.prompt_file"),
    "prompt-word-unknown": ("data.prompt_file", "eval.prompt_file", "rl.negative_prompt"),
    "prompt-duplicate": ("data.prompt_file", "eval.prompt_file"),
    "prompt-file-short": ("data.rows_per_step",),
    "disk-space": ("checkpoint.keep_last",),
    "tracker-missing": ("logging.wandb", "logging.trackio"),
    "tracker-project": ("logging.project",),
    "job-name": ("job.name",),
    "alarms-stop": ("alarms.stop",),
}  # fmt: skip
"""Rule -> keys that its findings are about. Entry 0 stands for every entry of an array of tables."""

_BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key as the reference shows it. `default` is a TOML value, `unset` or `required`."""

    path: Path
    type: str
    default: str
    meaning: str
    rules: tuple[str, ...]

    @property
    def name(self) -> str:
        """The dotted key, as `--set` takes it."""
        return dotted(self.path)

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return variable(self.path)


def json_schema() -> dict[str, Any]:
    """The profile as JSON Schema, draft 2020-12, with `extends` at the top. TOML has no null, so it allows none."""
    found = _tidy(Profile.model_json_schema())
    extends = {
        "type": "string",
        "minLength": 1,
        "description": "The profile below this one: the name of a bundled profile, or a path relative to this file.",
    }
    return {
        "$schema": DIALECT,
        "title": "nftctl profile",
        "description": found["description"],
        "type": "object",
        "additionalProperties": False,
        "properties": {"extends": extends, **found["properties"]},
        "$defs": found["$defs"],
    }


def json_schema_text() -> str:
    """The same as a file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _tidy(node: Any) -> Any:
    """A node without generated titles, null branches, defaults that are null or whole tables, and line breaks."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy: dict[str, Any] = {}
    for name, value in node.items():
        if name == "properties" or name == "$defs":
            tidy[name] = {key: _tidy(item) for key, item in value.items()}
        elif name == "description":
            tidy[name] = " ".join(value.split())
        elif name == "anyOf":
            branches = [_tidy(branch) for branch in value if branch != {"type": "null"}]
            tidy |= branches[0] if len(branches) == 1 else {"anyOf": branches}
        elif name == "default":
            if value is not None and "$ref" not in node:
                tidy[name] = value
        elif name != "title":
            tidy[name] = _tidy(value)
    return tidy


def keys() -> list[Key]:
    """Every key of a profile in the order of the schema. Raises LookupError for a rule missing from JUDGED."""
    schema = json_schema()
    return [_key(schema, path) for path in leaves()]


def rules_of(name: str) -> tuple[str, ...]:
    """Codes of the rules that judge a key or table. Raises LookupError for a rule missing from JUDGED."""
    from nftctl.profile.preflight import RULES

    unknown = [rule.code for rule in RULES if rule.code not in JUDGED]
    if unknown:
        raise LookupError(f"JUDGED must say which keys these rules judge: {', '.join(unknown)}")
    # Those that are above profiles are no RULES.
    codes = dict.fromkeys([*(rule.code for rule in RULES), *JUDGED])
    return tuple(code for code in codes if name in JUDGED[code])


def section_meaning(path: Path) -> str:
    """What a table is for, from the docstring of its class."""
    schema = json_schema()
    node = schema
    for step in path:
        node = _below(schema, node, step)
    return str(node.get("description", ""))


def _key(schema: Mapping[str, Any], path: Path) -> Key:
    above: Mapping[str, Any] = schema
    for step in path[:-1]:
        above = _below(schema, above, step)
    node = above["properties"][path[-1]]
    if path[-1] in above.get("required", ()):
        default = "required"
    else:
        default = json.dumps(node["default"], ensure_ascii=False) if "default" in node else "unset"
    return Key(path, type_text(node), default, node["description"], rules_of(dotted(path)))


def _below(schema: Mapping[str, Any], node: Mapping[str, Any], step: str | int) -> Any:
    below = node["items"] if isinstance(step, int) else node["properties"][step]
    return schema["$defs"][below["$ref"].rpartition("/")[2]] if "$ref" in below else below


def type_text(node: Mapping[str, Any]) -> str:
    """A node of the JSON Schema in words: `number above 0`, `array of 2 numbers`, `"a" or "b"`."""
    if "anyOf" in node:
        return ", or ".join(type_text(branch) for branch in node["anyOf"])
    if "const" in node or "enum" in node:
        return " or ".join(json.dumps(word) for word in node.get("enum", [node.get("const")]))
    kind = node["type"]
    if kind == "array":
        count = f"{node['minItems']} " if node.get("minItems") == node.get("maxItems", -1) else ""
        return f"array of {count}{_plural(node['items'])}"
    if kind == "object":
        return f"table of {_plural(node['additionalProperties'])}"
    word = {"string": "text", "boolean": "true or false", "integer": "whole number", "number": "number"}[kind]
    bounds = [f"{words} {_bound(node[name])}" for name, words in _BOUNDS.items() if name in node]
    return " ".join([word, " and ".join(bounds)]).rstrip()


def _plural(node: Mapping[str, Any]) -> str:
    if node["type"] == "array":
        return f"arrays of {_plural(node['items'])}"
    return {"string": "texts", "integer": "whole numbers", "number": "numbers"}[node["type"]]


def _bound(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:g}"
