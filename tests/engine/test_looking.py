"""Looks in a real world: they move nothing, leave what they say they leave, and fail like evaluations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.errors import RewardFailed
from nftctl.profile.load import load_profile
from nftctl.run.directory import find_checkpoint
from tests.engine.test_resume import Between
from tests.engine.test_world import promised, rows_of, tensors_of
from tests.reward.fault_server import FaultServer
from tests.roles.samples import running

pytestmark = pytest.mark.ray

BRIGHT = '[[reward.providers]]\nname = "bright"\nkind = "embedded"\nscorer = "brightness"\n'
JUDGE = '[[eval.providers]]\nname = "digits"\nkind = "embedded"\nscorer = "tiny_digits"\n'
QUIET = ('eval.prompt_file=""', "samples.prompts=0")
LOOKS = ("samples.every=2", "samples.prompts=3", "samples.noises=2", "eval.every=2", "eval.steps=2",
         "eval.samples_per_prompt=2")  # fmt: skip
Launch = Callable[..., dict[str, Any]]


@pytest.fixture
def launch(world4: Any, reporter: Any, tmp_path: Path) -> Launch:
    """`launch(steps, *sets, tables=...)` runs the tiny profile, trained for brightness, on the started world."""
    numbers = itertools.count()

    def go(steps: int, *sets: str, tables: str = JUDGE, world: Any = world4) -> dict[str, Any]:
        plan = plan_launch(profile(tmp_path, steps, f"run{next(numbers)}", sets, tables), run_dir=tmp_path)
        return run_job(plan, reporter, world)

    return go


def profile(folder: Path, steps: int, name: str, sets: tuple[str, ...], tables: str = JUDGE) -> Any:
    path = folder / "looked-at.toml"
    path.write_text(f'extends = "tiny_t2i_cpu"\n{tables if "reward.providers" in tables else BRIGHT + tables}')
    sets = ("data.rows_per_step=3", "rl.sample_steps=4", "logging.tensorboard=false", f'job.name="{name}"', *sets)
    return load_profile(path, sets=list(sets), flags={"rl.max_steps": steps}, env={})


def facts_of(run: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(run) / "samples" / f"{name}.json").read_text())
    return found


def images_of(run: str, name: str) -> dict[tuple[int, int], np.ndarray]:
    """(row, column) -> the single images of a picture in their own size, cut out by what lies beside it."""
    facts = facts_of(run, name)
    with Image.open(Path(run) / "samples" / f"{name}.png") as sheet:
        pixels = np.asarray(sheet)
    shape = [len(row) for row in facts.get("rewards", [facts.get("best"), facts.get("worst")])]
    (width, height), (left, top), (right, down) = facts["cell"], facts["origin"], facts["pitch"]
    return {
        (i, j): pixels[top + i * down :, left + j * right :][: height : height // 8, : width : width // 8]
        for i, count in enumerate(shape)
        for j in range(count)
    }


def brightness(image: np.ndarray) -> float:
    return float(image.mean() / 255)


@pytest.fixture(scope="module")
def looked(world4: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """A run of four steps with every kind of look, and what its ranks kept after each of their calls."""
    from tests.conftest import Quiet

    folder = tmp_path_factory.mktemp("looked")

    def kept(method: str) -> Any:
        if method not in ("sample", "train", "extremes"):
            return None
        return method, world4.call("apply", lambda w: (
            sum(t.image is not None for t in w._trajectories), sum(t.image is not None for t in w._onlooker._kept)
        ))  # fmt: skip

    watching = Between(world4, kept)
    plan = plan_launch(profile(folder, 4, "looked", LOOKS), run_dir=folder)
    return run_job(plan, Quiet(), watching), watching.seen  # type: ignore[arg-type]


# -- what it does not move -----------------------------------------------------------------------------------------


def test_looks_of_every_kind_change_no_bit_of_the_run(looked: Any, launch: Launch) -> None:
    summary, _ = looked
    quiet = launch(4, *QUIET, tables="")
    assert not list((Path(quiet["run"]) / "samples").iterdir())
    assert [promised(row) for row in rows_of(summary)] == [promised(row) for row in rows_of(quiet)]
    assert all(row["forwards/planned"] == row["forwards/executed"] for row in rows_of(summary))
    assert tensors_of(Path(summary["checkpoint"])) == tensors_of(Path(quiet["checkpoint"]))


def test_images_are_kept_in_the_steps_that_are_shown_and_let_go_of_after(looked: Any) -> None:
    kept = [(method, set(ranks)) for method, ranks in looked[1]]
    ordinary, due = [("sample", {(0, 0)}), ("train", {(0, 0)})], [("sample", {(3, 0)}), ("train", {(0, 3)})]
    assert kept == [*ordinary, *due, ("extremes", {(0, 0)})] * 2


# -- what it leaves ------------------------------------------------------------------------------------------------


def test_pictures_and_what_lies_beside_them(looked: Any) -> None:
    summary, _ = looked
    names = {path.name for path in (Path(summary["run"]) / "samples").iterdir()}
    pictures = {"step_000000", "step_000002", "step_000004", "extremes_000002", "extremes_000004"}
    assert names == {f"{name}.{kind}" for name in pictures for kind in ("png", "json")} | {"before_after.png"}
    assert summary["samples"].endswith("before_after.png")


@pytest.mark.parametrize("step", [0, 2, 4])
def test_under_each_image_stands_its_own_reward(looked: Any, step: int) -> None:
    run = looked[0]["run"]
    facts, images = facts_of(run, f"step_{step:06d}"), images_of(run, f"step_{step:06d}")
    assert (facts["step"], facts["columns"]) == (step, ["base", "old", "policy"])
    assert len(images) == 6 * 3
    assert [facts["prompts"][i] == facts["prompts"][i + 1] for i in range(5)] == [True, False, True, False, True]
    for (i, j), image in images.items():
        assert facts["rewards"][i][j] == pytest.approx(brightness(image), abs=1e-6)


def test_columns_are_the_base_and_what_became_of_it(looked: Any) -> None:
    run = looked[0]["run"]
    first, middle, last = (images_of(run, f"step_{step:06d}") for step in (0, 2, 4))
    for row in range(6):
        for images in (first, middle, last):
            assert (images[row, 0] == first[row, 0]).all()
        assert (first[row, 1] == first[row, 0]).all()
        assert (first[row, 2] == first[row, 0]).all()
    # Another noise is another image, and after some steps so is what the policy makes of it.
    assert all((first[2 * n, 0] != first[2 * n + 1, 0]).any() for n in range(3))
    assert any((last[row, 2] != last[row, 0]).any() for row in range(6))
    assert any((last[row, 2] != middle[row, 2]).any() for row in range(6))
    assert facts_of(run, "step_000000")["same_as"] == {"old": "base", "policy": "base"}
    assert facts_of(run, "step_000004")["same_as"] == {}


@pytest.mark.parametrize("step", [2, 4])
def test_the_extremes_are_those_of_the_step_s_own_rewards(looked: Any, step: int) -> None:
    run = looked[0]["run"]
    facts, images = facts_of(run, f"extremes_{step:06d}"), images_of(run, f"extremes_{step:06d}")
    scores = [json.loads(line) for line in (Path(run) / "scores.jsonl").open()]
    (table,) = [row["rewards"] for row in scores if row["step"] == step]
    ranked = sorted((reward for row in table for reward in row), reverse=True)
    assert len(ranked) == 12
    assert [shown["reward"] for shown in facts["best"]] == ranked[:4]
    assert [shown["reward"] for shown in facts["worst"]] == ranked[::-1][:4]
    for i, name in enumerate(("best", "worst")):
        for j, shown in enumerate(facts[name]):
            assert shown["reward"] == table[shown["row"] - 3 * (step - 1)][shown["rank"]]
            assert shown["reward"] == pytest.approx(brightness(images[i, j]), abs=1e-6)
    assert len({(s["row"], s["rank"]) for name in ("best", "worst") for s in facts[name]}) == 8


def test_evaluations_are_scored_by_their_own_providers(looked: Any) -> None:
    rows = [json.loads(line) for line in (Path(looked[0]["run"]) / "evaluations.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 2, 4]
    for row in rows:
        assert row["eval/reward"] == row["eval/digits"]
        assert row["eval/samples"] == 24
        assert "eval/digits/judge" in row
        assert "eval/bright" not in row
    assert rows[0]["eval/kl_distance"] == 0.0
    assert 0 < rows[1]["eval/kl_distance"] != rows[2]["eval/kl_distance"] > 0
    assert all("reward/bright" in row and "reward/digits" not in row for row in rows_of(looked[0]))


def test_a_copied_old_is_drawn_as_the_policy_that_it_is(launch: Launch) -> None:
    run = launch(1, *LOOKS, "samples.noises=1", 'eval.prompt_file=""', 'rl.old.decay="copy"', tables="")["run"]
    assert facts_of(run, "step_000001")["same_as"] == {"old": "policy"}
    images = images_of(run, "step_000001")
    assert all((images[row, 1] == images[row, 2]).all() for row in range(3))


def test_a_resumed_run_draws_the_grid_that_it_would_have_drawn(
    looked: Any, launch: Launch, world4: Any, reporter: Any, tmp_path: Path
) -> None:
    halted = launch(2, *LOOKS)
    run, checkpoint = find_checkpoint(halted["run"], tmp_path)
    plan = plan_resume(run, checkpoint, profile(tmp_path, 4, run.name, LOOKS), steps=4)
    run_job(plan, reporter, world4)
    for name in ("step_000000", "step_000002", "step_000004", "extremes_000002", "extremes_000004"):
        ours, theirs = (Path(path) / "samples" for path in (looked[0]["run"], halted["run"]))
        for kind in ("png", "json"):
            assert (ours / f"{name}.{kind}").read_bytes() == (theirs / f"{name}.{kind}").read_bytes(), name


@pytest.mark.parametrize("penalty", [0, 0.01])
def test_whole_trained_weights_are_drawn_beside_the_base_that_they_replaced(
    launch: Launch, world4: Any, reporter: Any, tmp_path: Path, penalty: float
) -> None:
    """Without a penalty no reference is kept; a resumed run samples the base before it loads what was trained."""
    full = ('model.train="full"', "optimizer.lr=1e-3", "rl.ema_decay=0.9", 'eval.weights="ema"', *LOOKS)
    full = (*full, "samples.every=1", "eval.every=1", f"rl.kl_beta={penalty}")
    halted = launch(1, *full, tables="")
    run, checkpoint = find_checkpoint(halted["run"], tmp_path)
    run_job(plan_resume(run, checkpoint, profile(tmp_path, 2, run.name, full, ""), steps=2), reporter, world4)
    first, middle, last = (images_of(halted["run"], f"step_{step:06d}") for step in (0, 1, 2))
    assert facts_of(halted["run"], "step_000002")["columns"] == ["base", "old", "ema", "policy"]
    for row in range(6):
        assert (first[row, 0] == middle[row, 0]).all()
        assert (first[row, 0] == last[row, 0]).all()
    for one, other in itertools.combinations(range(4), 2):
        assert any((last[row, one] != last[row, other]).any() for row in range(6)), (one, other)
    distances = [
        json.loads(line).get("eval/kl_distance") for line in (Path(halted["run"]) / "evaluations.jsonl").open()
    ]
    if penalty:
        assert distances[0] == 0.0 < distances[1] != distances[2] > 0
    else:
        assert distances == [None, None, None]


# -- services ------------------------------------------------------------------------------------------------------


def http(section: str, url: str, revision: str = "fault/1") -> str:
    return f'[[{section}.providers]]\nname = "far"\nurl = "{url}"\nrevision = "{revision}"\n'


def test_a_judge_is_asked_for_evaluations_alone(launch: Launch) -> None:
    with running(FaultServer()) as judge:
        summary = launch(2, *LOOKS, tables=http("eval", judge.url))
    # Twice, by four ranks with six images each; grids and training ask the run's own reward.
    assert judge.requests == 2 * 4
    assert summary["eval"]["after"]["eval/far"] == summary["eval"]["after"]["eval/reward"]
    quiet = ("samples.prompts=0",)
    with running(FaultServer()) as judge:
        unasked = launch(1, *quiet, 'eval.prompt_file=""', tables=http("eval", judge.url))
    assert (judge.infos, judge.requests) == (0, 0)
    assert unasked["eval"] is None


def test_a_judge_of_another_revision_is_refused_before_anything_is_made(launch: Launch, tmp_path: Path) -> None:
    with (
        running(FaultServer(revision="fault/2")) as judge,
        pytest.raises(RewardFailed, match="the profile pins 'fault/1'"),
    ):
        launch(1, *LOOKS, tables=http("eval", judge.url))
    assert not (tmp_path / "run0").exists()


@pytest.mark.parametrize("section", ["eval", "reward"])
def test_a_failed_score_ends_the_run_with_all_ranks_alive(launch: Launch, world4: Any, section: str) -> None:
    """For evaluations at the judge's second request, on one rank; for a grid where nothing else asks before step 1."""
    quiet = ("reward.retries=0", "eval.every=0", "samples.every=0")
    sets = (*LOOKS, *quiet) if section == "eval" else (*LOOKS, *quiet, 'eval.prompt_file=""')
    with running(FaultServer("status-400", after=2, times=1)) as service, pytest.raises(RewardFailed, match="400"):
        launch(1, *sets, tables=http(section, service.url))
    assert world4.whole
    assert launch(1, *QUIET, tables="")["steps"]["to"] == 1
