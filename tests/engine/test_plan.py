"""What is known of a run before any process is started, and what makes it the same run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nftctl.engine.plan import JobPlan, plan_launch, required_revision, run_folder_name
from nftctl.errors import RewardFailed
from nftctl.profile.prompts import base_folder, resolve_prompt_file
from nftctl.profile.schema import Provider
from nftctl.reward.scorers import scorer_revision
from tests.conftest import clean_environment


@pytest.fixture
def plan(tiny: Any, tmp_path: Path) -> Any:
    """`plan("rl.beta=2.0", ..., steps=3)`."""

    def make(*sets: str, steps: int = 3) -> JobPlan:
        return plan_launch(tiny(steps, sets), run_dir=tmp_path, argv=["nftctl", "launch"])

    return make


def test_a_plan_creates_nothing_and_says_everything(plan: Any, tmp_path: Path) -> None:
    made = plan('job.name="mine"', "checkpoint.every=7")
    shown = made.describe()
    assert list(tmp_path.iterdir()) == []
    assert json.loads(json.dumps(shown)) == shown
    assert shown["run"] == str(tmp_path / "mine")
    assert shown["steps"] == {"from": 0, "to": 3}
    assert (shown["ranks"], shown["rows_per_step"], shown["samples_per_step"]) == (4, 4, 16)
    assert shown["prompts"]["count"] == 48
    assert shown["checkpoint_every"] == 7
    assert shown["resume_from"] is None
    assert shown["reward"] == [
        {"name": "digits", "kind": "embedded", "url": "", "revision": scorer_revision("tiny_digits"), "weight": 1.0}
    ]
    assert shown["identity"] == made.identity_hash
    assert not made.nothing_to_do


def test_the_record_of_a_run_holds_what_a_resume_compares(plan: Any) -> None:
    made = plan()
    record = made.record()
    assert record["identity_document"] == made.identity
    assert record["seed_contract"] == made.seed_contract
    assert record["reward_revisions"] == {"digits": scorer_revision("tiny_digits")}
    assert (record["total_steps"], record["argv"]) == (3, ["nftctl", "launch"])
    assert plan().run_id != made.run_id


def test_the_record_says_how_many_modules_each_target_selects(plan: Any) -> None:
    """By the base's headers, and in the identity: the same words on another base, or read another way, are another."""
    pattern = "/layers\\\\.[0-2]\\\\..*add_k_proj/"
    made = plan(f'model.lora.targets=["add_q_proj", "{pattern}"]')
    assert made.record()["identity_document"]["model.lora.modules"] == {
        "add_q_proj": 4,
        r"/layers\.[0-2]\..*add_k_proj/": 3,
    }
    assert "model.lora.modules" not in plan("model.train=full").identity


def test_the_folder_has_the_jobs_name_or_the_profiles_with_the_time(tiny: Any) -> None:
    assert run_folder_name(tiny(1, ('job.name="mine"',))) == "mine"
    name, _, moment = run_folder_name(tiny(1)).partition("-")
    assert name == "tiny_t2i_cpu"
    assert len(moment) == len("20300101-120000")
    assert moment.replace("-", "").isdigit()


EXCLUDED = (
    'job.name="other"', 'job.run_dir="elsewhere"', "checkpoint.every=3", "checkpoint.keep_last=9",
    "logging.tensorboard=true", "samples.prompts=2", "eval.samples_per_prompt=3", "eval.seed=9",
    "grid.collective_timeout_s=240", "model.shard=reshard", 'model.prompt_encoder="per-step"', 'model.compile="never"',
    "model.gradient_checkpointing=true", "reward.deadline_s=30", "reward.read_timeout_s=7",
    "reward.connect_timeout_s=1", "reward.retries=1",
)  # fmt: skip
INCLUDED = (
    "rl.seed=1", "rl.beta=2.0", "rl.kl_beta=0.1", "rl.guidance=2.0", "rl.group_size=2", "rl.old.update_every=2",
    'rl.old.decay="copy"', "rl.advantage_high=4.0", "rl.timesteps_per_sample=2", "optimizer.lr=0.002",
    "optimizer.warmup_steps=3", "model.lora.rank=8", "model.train_micro_batch=2", "data.rows_per_step=2",
    "data.shuffle=true", 'reward.on_failure="drop-group"',
)  # fmt: skip


@pytest.mark.parametrize("change", EXCLUDED)
def test_what_cannot_change_a_result_is_outside_the_identity(plan: Any, change: str) -> None:
    assert plan(change).identity == plan().identity
    assert plan(change).identity_hash == plan().identity_hash


def test_more_steps_and_another_copy_of_the_files_are_the_same_run(plan: Any, tmp_path: Path) -> None:
    shutil.copytree(base_folder("embedded"), tmp_path / "base")
    shutil.copy(resolve_prompt_file("embedded", "train"), tmp_path / "mine.txt")
    moved = plan(f'rl.init_from="{tmp_path / "base"}"', f'data.prompt_file="{tmp_path / "mine.txt"}"', steps=9)
    assert moved.identity_hash == plan().identity_hash
    (tmp_path / "mine.txt").write_text((tmp_path / "mine.txt").read_text() + "a red one\n")
    longer = plan(f'data.prompt_file="{tmp_path / "mine.txt"}"')
    assert longer.identity_hash != plan().identity_hash
    assert longer.seed_contract != plan().seed_contract


@pytest.mark.parametrize("change", INCLUDED)
def test_what_changes_a_result_is_inside_it(plan: Any, change: str) -> None:
    assert plan(change).identity_hash != plan().identity_hash


def test_a_provider_has_to_serve_what_is_pinned_or_the_packaged_scorers_own_hash() -> None:
    assert required_revision(Provider(name="a", url="http://127.0.0.1:1", revision="v7")) == "v7"
    embedded = Provider(name="a", kind="embedded", scorer="tiny_digits")
    assert required_revision(embedded) == scorer_revision("tiny_digits")


def test_a_pin_on_another_packaged_scorer_is_refused_with_both_hashes(plan: Any, tmp_path: Path) -> None:
    served = scorer_revision("tiny_digits")
    entry = '[{name = "digits", kind = "embedded", scorer = "tiny_digits", revision = "%s"}]'
    with pytest.raises(RewardFailed, match=rf"pins revision abc.*tiny_digits is {served}"):
        plan("reward.providers=" + entry % "abc")
    assert list(tmp_path.iterdir()) == []
    assert plan("reward.providers=" + entry % served).identity_hash == plan().identity_hash
    with pytest.raises(RewardFailed, match=rf"pins revision abc.*tiny_digits is {served}"):
        plan("eval.providers=" + entry % "abc")


def test_who_scores_evaluations_is_on_record_and_no_part_of_the_run(plan: Any) -> None:
    judged = plan('eval.providers=[{name = "digits", url = "http://127.0.0.1:1", revision = "v7"}]')
    assert judged.judges == {"digits": "v7"}
    # Of the same name as the reward, and told apart from it.
    assert judged.revisions == {"digits": scorer_revision("tiny_digits")}
    assert judged.record()["eval_revisions"] == {"digits": "v7"}
    assert [(entry["name"], entry["revision"]) for entry in judged.describe()["eval"]] == [("digits", "v7")]
    assert judged.identity_hash == plan().identity_hash
    assert not {"eval", "eval_revisions"} & (set(plan().describe()) | set(plan().record()))


def test_a_plan_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from nftctl.engine.plan import plan_launch
from nftctl.profile.load import bundled_profiles, load_profile
plan_launch(load_profile(bundled_profiles()["tiny_t2i_cpu"], env={}), run_dir=Path(sys.argv[1])).describe()
heavy = {"torch", "ray", "diffusers", "peft", "transformers", "aiohttp"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=clean_environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
