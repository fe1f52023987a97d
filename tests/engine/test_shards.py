"""A run from a distributed checkpoint is the run from the folder that it was made of, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from nftctl.engine.loop import run_job
from nftctl.engine.plan import plan_launch, plan_resume
from nftctl.errors import ResumeRefused
from nftctl.profile.artifacts import EMBEDDED_BASE
from nftctl.run.directory import find_checkpoint
from tests.model.shards import cut

pytestmark = pytest.mark.ray


def rows_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Metric rows, but for timings and machine figures."""
    rows = [orjson.loads(line) for line in (Path(summary["run"]) / "metrics.jsonl").read_bytes().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timer/", "system/"))} for row in rows]


def test_it_trains_and_resumes_as_from_the_whole_base(world4: Any, tiny: Any, reporter: Any, tmp_path: Path) -> None:
    shards = cut(EMBEDDED_BASE, tmp_path / "shards", 3)
    source = (f'rl.init_from="{shards}"', f'model.tokenizer="{EMBEDDED_BASE}/tokenizer"')
    skip = 'rl.init_keys_to_skip_loading=["layers.1.mlp_moe_gen.up_proj"]'
    rows = {}
    for name, sets in (("whole", ()), ("cut", source)):
        resolved = tiny(2, (f'job.name="{name}"', skip, *sets))
        rows[name] = rows_of(run_job(plan_launch(resolved, run_dir=tmp_path), reporter, world4))
    assert rows["cut"] == rows["whole"]
    said = [note.split(",")[0] for note in reporter.notes if "base tensors loaded" in note]
    assert [line.split(": ")[1] for line in said] == ["90 of 91 base tensors loaded"] * 2
    run, checkpoint = find_checkpoint(str(tmp_path / "cut"), tmp_path)
    more = run_job(plan_resume(run, checkpoint, tiny(3, ('job.name="cut"', skip, *source)), steps=3), reporter, world4)
    assert len(rows_of(more)) == 3
    # The pipeline folder is another base: it brings a tokenizer and a scheduler of its own.
    with pytest.raises(ResumeRefused) as refused:
        plan_resume(run, find_checkpoint(str(run.path), tmp_path)[1], tiny(4, ('job.name="cut"', skip)), steps=4)
    assert [difference.key for difference in refused.value.differences] == ["base.fingerprint", "model.tokenizer_hash"]
