"""`validate`: which profile, every finding with its place, every value with its origin, and nothing else happens."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from nftctl.profile.load import bundled_profiles
from nftctl.profile.prompts import resolve_prompt_file
from tests.profile.conftest import COMPLETE, PROVIDER, toml_of, write_place

from .program import nftctl, the_object

PROMPTS = resolve_prompt_file("embedded:scenes", "train")


def test_the_default_is_named_on_stderr_and_accepted(tmp_path: Path) -> None:
    answer = nftctl("validate", cwd=tmp_path)
    assert answer.returncode == 0
    assert "using the embedded default scenes_t2i_cpu: " in answer.stderr
    digest = hashlib.sha256(PROMPTS.read_bytes()).hexdigest()
    count = len(PROMPTS.read_text().splitlines())
    verdict, memory = answer.stdout.splitlines()
    assert verdict == f"scenes_t2i_cpu: valid; {count} prompts, sha256 {digest[:12]}"
    assert re.fullmatch(
        r"memory per rank: about [0-9.]+ MiB at the peak, most of it activations .* \(--memory\)", memory
    )
    assert list(tmp_path.iterdir()) == []


def test_every_mistake_at_once_with_its_line_and_the_likely_fix(tmp_path: Path) -> None:
    text = 'extends = "tiny_t2i_cpu"\n\n[rl]\nbeta = "big"\nsample_step = 3\n'
    (tmp_path / "profile.toml").write_text(text)
    answer = nftctl("validate", "--set", "grid.bakend=x", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (3, "")
    lines = answer.stderr.splitlines()
    assert lines[0] == "using ./profile.toml, found in the working folder"
    assert any(line.startswith("profile.toml:4:") and "rl.beta" in line for line in lines)
    assert any(line.startswith("profile.toml:5:1: error[unknown-key]: rl.sample_step") for line in lines)
    assert "  help: did you mean rl.sample_steps?" in lines
    assert any(line.startswith("--set grid.bakend=x: error[unknown-key]") for line in lines)
    assert lines[-1] == "error: 3 errors in the profile"
    document = the_object(nftctl("validate", "--set", "grid.bakend=x", "--json", cwd=tmp_path))
    assert {(f["key"], f["line"]) for f in document["diagnostics"]} == {
        ("rl.beta", 4), ("rl.sample_step", 5), ("grid.bakend", None),
    }  # fmt: skip


def test_every_value_has_its_origin(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "tiny_t2i_cpu"\n[rl]\nbeta = 0.5\n')
    arguments = ("validate", "mine.toml", "--set", "rl.kl_beta=0.25", "--show-resolved")
    env = {"NFTCTL_OPTIMIZER__LR": "0.002"}
    values = the_object(nftctl(*arguments, "--json", cwd=tmp_path, env=env))["resolved"]
    assert values["rl.beta"] == {"value": 0.5, "source": "profile", "origin": "mine.toml:3:1"}
    assert values["rl.kl_beta"] == {"value": 0.25, "source": "set", "origin": "--set rl.kl_beta=0.25"}
    assert values["optimizer.lr"] == {"value": 0.002, "source": "env", "origin": "env NFTCTL_OPTIMIZER__LR"}
    assert values["rl.seed"]["source"] == "default"
    assert values["rl.profile"]["origin"].startswith(f"{bundled_profiles()['tiny_t2i_cpu']}:")
    assert values["reward.providers.0.scorer"]["value"] == "tiny_digits"
    shown = nftctl(*arguments, cwd=tmp_path, env=env).stdout.splitlines()
    assert [line.split() for line in shown if line.startswith("rl.beta ")] == [["rl.beta", "0.5", "mine.toml:3:1"]]
    assert len(shown) == 2 + len(values)


def test_the_rules_are_listed_with_their_reasons(tmp_path: Path) -> None:
    from nftctl.cli.validate import every_rule
    from nftctl.profile.preflight import RULES

    assert every_rule()[:-1] == RULES
    assert every_rule()[-1].code == "reward-scorer-unfit"
    rules = the_object(nftctl("validate", "--rules", "--json", cwd=tmp_path))["rules"]
    assert [rule["code"] for rule in rules if not rule["online"]] == [rule.code for rule in every_rule()]
    assert [rule["code"] for rule in rules if rule["online"]] == [
        "reward-unreachable", "reward-revision-differs", "ray-unreachable", "ray-unfit", "gpus-too-few",
    ]  # fmt: skip
    warnings = {rule["code"] for rule in rules if rule["severity"] == "warning"}
    assert warnings == {rule.code for rule in RULES if rule.severity == "warning"}
    assert {"old-decay-flat", "guidance-zero", "sigmoid-tau", "prompt-duplicate"} <= warnings
    assert all(rule["reason"] for rule in rules)
    lines = nftctl("validate", "--rules", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [rule["code"] for rule in rules]
    assert [line.split()[1] for line in lines if "guidance" in line] == ["warns"]
    assert [line.split()[1] for line in lines if "GPU for every rank" in line] == ["--online"]


def test_memory_is_listed_part_by_part_and_adds_up(tmp_path: Path) -> None:
    memory = the_object(nftctl("validate", "--json", cwd=tmp_path))["memory"]
    sizes = {part["name"]: part["bytes"] for part in memory["parts"]}
    assert list(sizes) == [
        "base shard", "gathered base", "prompt encoder", "prompt cache", "LoRA", "gradients", "optimizer",
        "activations", "latents", "decoder", "decode",
    ]  # fmt: skip
    during = {when: sum(p["bytes"] for p in memory["parts"] if p["when"] == when) for when in ("rollout", "training")}
    assert memory["always_bytes"] == sum(sizes.values()) - sum(during.values())
    assert memory["peak_bytes"] == memory["always_bytes"] + max(during.values())
    assert memory["ranks"] == 4
    lines = nftctl("validate", "--memory", cwd=tmp_path).stdout.splitlines()
    shown = {line[2:].split("  ")[0] for line in lines[2:-1]}
    assert shown == {name for name, size in sizes.items() if size}
    assert lines[-1].startswith("  not counted: the process itself (Python, torch and Ray: about 0.5 GiB")


def test_a_base_that_does_not_say_its_geometry_is_not_estimated(tmp_path: Path) -> None:
    write_place(tmp_path)
    (tmp_path / "base" / "transformer" / "config.json").write_text("{}")
    (tmp_path / "p.toml").write_text(toml_of(COMPLETE, [PROVIDER]))
    assert the_object(nftctl("validate", "p.toml", "--json", cwd=tmp_path))["memory"] is None
    assert "memory: not estimated" in nftctl("validate", "p.toml", "--memory", cwd=tmp_path).stdout


def test_a_profile_from_standard_input(tmp_path: Path) -> None:
    text = 'extends = "tiny_t2i_cpu"\n[rl]\nbeta = 0.5\n'
    assert nftctl("validate", "-", cwd=tmp_path, stdin=text).stdout.startswith("stdin: valid")


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    answer = nftctl("validate", "tiny_t2i_gpu", cwd=tmp_path)
    assert answer.returncode == 3
    assert "did you mean tiny_t2i_cpu?" in answer.stderr
    assert nftctl("validate", "no/where.toml", cwd=tmp_path).returncode == 3
    for folder in (".", "..", "/tmp"):
        answer = nftctl("validate", folder, cwd=tmp_path)
        assert answer.returncode == 3
        assert "this is a folder" in answer.stderr


def test_a_token_is_never_repeated(tmp_path: Path) -> None:
    env = {"NFTCTL_REWARD_TOKEN": "sentinel-7f3a", "NFTCTL_REWARD_TOKN": "sentinel-7f3a"}
    answer = nftctl("validate", "--json", cwd=tmp_path, env=env)
    assert answer.returncode == 3
    assert "NFTCTL_REWARD_TOKN" in answer.stdout
    assert "sentinel" not in answer.stdout + answer.stderr
