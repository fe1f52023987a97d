"""What `bench` prints and leaves: the table, the sentences, chart and document; and the bases that it writes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nftctl.cli import bench
from nftctl.cli.console import Console
from nftctl.engine.chart import FLOOR, WORK, Bar, write_bars
from nftctl.errors import CheckpointUnusable, TrainingFailed, UsageRefused

from .program import nftctl, the_object

DOCUMENT: dict[str, Any] = {
    "profile": "mine",
    "label": "",
    "ranks": 2,
    "devices": [{"device": "a GPU", "matmul_flops_per_second": 8e14, "matmul_dtype": "bfloat16"}] * 2,
    "versions": {},
    "settings": {
        "rollout_precision": "base",
        "height": 512, "width": 512, "rows_per_step": 4, "sample_steps": 20, "guidance": 3.0, "dtype": "bfloat16",
    },
    "warm": 2,
    "step": {
        "seconds": 1.25, "all_seconds": [1.2, 1.25, 1.3], "parts_seconds": 1.25, "floor_seconds": 0.8, "ratio": 1.5625,
        "samples_per_second": 6.4, "samples_per_second_per_rank": 3.2, "mfu": 0.64, "outside_denoiser_share": 0.08,
    },
    "rollout": {
        "forwards": 160, "executed": 160, "ms_per_forward": 6.0, "ms_with_solver": 6.3, "floor_ms": 4.8, "ratio": 1.25,
        "ratio_with_solver": 1.3125,
    },
    "training": {"pairs": 4, "ms_per_pair": 14.0, "floor_ms": 10.0, "ratio": 1.4},
    "parts": [
        {"name": "sample/forward", "title": "rollout: denoiser forwards", "seconds": 1.15, "by_rank": [1.15, 1.15],
         "share": 0.92, "floor_seconds": 0.8, "ratio": 1.4375},
        {"name": "sample/decode", "title": "decode", "seconds": 0.1, "by_rank": [0.1, 0.1], "share": 0.08,
         "floor_seconds": None, "ratio": None},
    ],
    "beside": [{"name": "image encoding", "by_rank": [0.01, 0.02]}],
    "forwards": {"planned": 164, "executed": 164},
    "gathers": {"calls": 0, "bytes": 0, "before_calls": 38, "before_bytes": 14_000_000_000},
    "gpu_peak_gb": {"sample": 24.0, "train": 21.5},
    "built": {},
    "naive": None,
}  # fmt: skip
NAIVE: dict[str, Any] = {
    "what": "the plain way", "extrapolated_from": "6 sampler steps and 3 pairs", "ms_per_forward": 181.0,
    "ms_per_pair": 400.0, "rollout_seconds": 29.0, "step_seconds": 30.5, "forward_ratio": 30.2, "pair_ratio": 28.6,
    "step_ratio": 24.4,
    "relative_error": {
        "ours_to_stock": 0.012, "ours_to_float32": 0.009, "lowered_to_float32": None, "stock_to_float32": 0.0095,
        "float32_skipped": "",
    },
}  # fmt: skip


def with_naive(**errors: Any) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    document["naive"] = copy.deepcopy(NAIVE)
    document["naive"]["relative_error"] |= errors
    return document


def printed(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    bench._print(Console(), document)
    return capsys.readouterr().out


def test_the_table_ends_with_the_step_and_the_sentences_follow(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(DOCUMENT, capsys).splitlines()
    assert lines[0] == "mine: 2 x a GPU, 512 x 512, 4 rows, 20 steps, guidance 3, bfloat16"
    assert [line.split()[-4:] for line in lines[2:5]] == [
        ["1150.00", "92.0", "%", "800.00", "1.44"][-4:],
        ["decode", "100.00", "8.0", "%"],
        ["100.0", "%", "800.00", "1.56"],
    ]
    text = "\n".join(lines[5:])
    assert "6.000 ms a sample-forward, floor 4.800: 1.25 x" in text
    assert "8.0 % of it outside the denoiser" in text
    assert "fp8" not in lines[0]
    assert "64.0 % of 800 TFLOP/s" in text
    assert "164 planned, 164 executed" in text
    assert "before them 38, 14.000 GB" in text
    assert "sample 24.0 GB, train 21.5 GB at the most" in text
    assert "image encoding 20.00 ms, not in the sum" in text
    assert "naive" not in text


def test_the_comparison_is_called_extrapolated(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(with_naive(), capsys)
    assert "181.000 ms a sample-forward: 30.20 x ours; 400.000 ms a pair: 28.60 x ours" in text
    assert "24.40 x ours (extrapolated from 6 sampler steps and 3 pairs" in text
    assert "against float32 ours 0.009, stock 0.0095; ours against stock 0.012" in text
    assert "rollout's precision 0.046" in printed(with_naive(lowered_to_float32=0.046), capsys)
    skipped = {"ours_to_float32": None, "stock_to_float32": None, "float32_skipped": "no room"}
    assert "float32 left out: no room; ours against stock 0.012" in printed(with_naive(**skipped), capsys)


def test_one_rank_is_labelled_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = {**DOCUMENT, "label": "one rank's work, not an NFT run"}
    assert "mine (one rank's work, not an NFT run): " in printed(document, capsys)
    chart = bench._write(document, tmp_path / "out")
    assert chart == tmp_path / "out" / "bench.png"
    stored = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert stored["label"] == document["label"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.json", "bench.png"]


def test_bars_are_as_long_as_the_seconds_and_marked_at_the_floor(tmp_path: Path) -> None:
    write_bars(tmp_path / "c.png", [Bar("a", 2.0, 1.0), Bar("b", 1.0)], ["title"])
    with Image.open(tmp_path / "c.png") as image:
        pixels = image.convert("RGB")
    colours = [tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in (WORK, FLOOR)]
    found: list[set[int]] = [set(), set()]
    for y in range(pixels.height - 40):
        for x in range(pixels.width):
            for i, colour in enumerate(colours):
                if pixels.getpixel((x, y)) == colour:
                    found[i].add(x)
    bar, floor = found
    assert max(bar) - min(bar) == 520
    assert abs((min(floor) + max(floor)) / 2 - (min(bar) + 260)) <= 1


def test_a_chart_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match="cannot write"):
        write_bars(tmp_path / "nowhere" / "c.png", [Bar("a", 1.0)], ["title"])


def test_the_logs_stay_where_a_rank_failed_and_only_then() -> None:
    with bench._scratch() as folder:
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(UsageRefused), bench._scratch() as folder:
        raise UsageRefused("no")
    assert not folder.exists()
    with pytest.raises(TrainingFailed), bench._scratch() as folder:
        raise TrainingFailed("a rank died")
    assert folder.is_dir()
    folder.rmdir()


def test_a_folder_in_use_is_refused_before_anything(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    answer = nftctl("bench", "--output", "mine", "--json", cwd=tmp_path)
    assert answer.returncode == 2
    assert "mine is there already and is not empty" in the_object(answer)["error"]["message"]


def test_a_base_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.write_base(Console(json=True), None, "cosmos3-tiny", tmp_path / "base")
    document = json.loads(capsys.readouterr().out)
    assert document["base"] == {"shape": "cosmos3-tiny", "path": str(tmp_path / "base")}
    assert {"transformer", "vae", "text_tokenizer"} <= {path.name for path in (tmp_path / "base").iterdir()}


@pytest.mark.soak
def test_the_whole_command(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--steps", "2", "--warm", "1", "--output", "o")
    answer = nftctl("bench", "tiny_t2i_cpu", *arguments, "--json", cwd=tmp_path)
    document = the_object(answer)
    assert document["bench"]["ranks"] == 2
    assert document["chart"] == "o/bench.png"
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
