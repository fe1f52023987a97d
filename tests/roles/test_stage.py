"""The line that says what a rank is in, and its reading."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nftctl.roles import stage


def test_what_was_said_last_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    assert stage.last_begun(path) == ""
    line = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.FileHandler(path)
    handler.setFormatter(line)
    stage.log.addHandler(handler)
    stage.log.setLevel(logging.INFO)
    try:
        stage.begin(6, "rollout")
        assert stage.last_begun(path) == "step 6, rollout"
        stage.begin(7, "backward", 1, 3)
        logging.getLogger("nftctl.stage").handlers[0].stream.write("nftctl.worker: step 9: not a stage\n")
        assert stage.last_begun(path) == "step 7, backward 2 of 3"
    finally:
        stage.log.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize("content", [b"", b"rank 0 of 2 on cpu, pid 7\n", b"\xff\xfe nftctl.stage: step x: rollout"])
def test_a_log_without_a_stage_tells_of_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank_0.log").write_bytes(content)
    assert stage.last_begun(tmp_path / "rank_0.log") == ""
