"""`validate`: which profile, every finding with its place, every value with its origin, and nothing else happens."""

from __future__ import annotations

import hashlib
from pathlib import Path

from nftctl.profile.load import bundled_profiles
from nftctl.profile.prompts import resolve_prompt_file

from .program import nftctl, the_object

PROMPTS = resolve_prompt_file("embedded", "train")


def test_the_default_is_named_on_stderr_and_accepted(tmp_path: Path) -> None:
    answer = nftctl("validate", cwd=tmp_path)
    assert answer.returncode == 0
    assert "tiny_t2i_cpu" in answer.stderr
    digest = hashlib.sha256(PROMPTS.read_bytes()).hexdigest()
    count = len(PROMPTS.read_text().splitlines())
    assert answer.stdout == f"tiny_t2i_cpu: valid; {count} prompts, sha256 {digest[:12]}\n"
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
    assert len(shown) == 1 + len(values)


def test_the_rules_are_listed_with_their_reasons(tmp_path: Path) -> None:
    from nftctl.profile.preflight import RULES

    rules = the_object(nftctl("validate", "--rules", "--json", cwd=tmp_path))["rules"]
    assert [rule["code"] for rule in rules] == [rule.code for rule in RULES]
    assert all(rule["reason"] for rule in rules)
    assert "grid-backend" in nftctl("validate", "--rules", cwd=tmp_path).stdout


def test_a_profile_from_standard_input(tmp_path: Path) -> None:
    text = 'extends = "tiny_t2i_cpu"\n[rl]\nbeta = 0.5\n'
    assert nftctl("validate", "-", cwd=tmp_path, stdin=text).stdout.startswith("stdin: valid")


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    answer = nftctl("validate", "tiny_t2i_gpu", cwd=tmp_path)
    assert answer.returncode == 3
    assert "did you mean tiny_t2i_cpu?" in answer.stderr
    assert nftctl("validate", "no/where.toml", cwd=tmp_path).returncode == 3


def test_a_token_is_never_repeated(tmp_path: Path) -> None:
    env = {"NFTCTL_REWARD_TOKEN": "sentinel-7f3a", "NFTCTL_REWARD_TOKN": "sentinel-7f3a"}
    answer = nftctl("validate", "--json", cwd=tmp_path, env=env)
    assert answer.returncode == 3
    assert "NFTCTL_REWARD_TOKN" in answer.stdout
    assert "sentinel" not in answer.stdout + answer.stderr
