"""Means and extremes over seeds, from runs made up by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nftctl.learning.summary import band, reached, summarise

FIGURES = ("reward", "judge", "diversity", "kl_distance")


def look(reward: float, **more: Any) -> dict[str, Any]:
    return dict.fromkeys(FIGURES, reward) | {"sample_ms": 5.0, "forwards": 10.0} | more


def point(reward: float, marks: tuple[int | None, int | None], seconds: float, samples: int) -> dict[str, Any]:
    return look(
        reward, seconds_mark=marks[0], samples_mark=marks[1], seconds=seconds, samples=samples, steps=samples // 4
    )


def a_run(method: str, seed: int, gain: float, failed: str = "") -> dict[str, Any]:
    """Two marks along each axis; the seconds' last one is passed with the samples' half spent."""
    curve = [point(0.5, (0, 0), 0, 0), point(0.5 + gain, (2, 1), 10.5, 4), point(0.5 + 2 * gain, (None, 2), 21.0, 8)]
    cost = dict.fromkeys(("step_seconds", "step_cpu_seconds", "forwards_per_sample", "backwards_per_sample"), 1.0)
    return {
        "method": method, "seed": seed, "failed": failed, "curve": curve[:2] if failed else curve,
        "guided": [] if failed else [look(0.9, guidance=3.0)],
        "cost": cost | {"rss_peak_mb": 300.0 + seed, "steps": 2, "seconds": 21.0, "samples": 8},
    }  # fmt: skip


def guided(seed: int) -> dict[str, Any]:
    looks = [look(0.5 + g / 10, guidance=g) for g in (1.0, 3.0)]
    return {"method": "guidance", "seed": seed, "failed": "", "curve": [], "guided": looks, "cost": {}}


def document(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"runs": list(runs), "plan": {"marks": 2, "guidance": 1.0}}


def test_bands() -> None:
    assert band([0.5, None, 0.7, 0.9]) == {"mean": pytest.approx(0.7), "low": 0.5, "high": 0.9}
    assert band([None]) is None


def test_a_mark_is_reached_by_the_first_point_at_or_beyond_it() -> None:
    run = a_run("nft", 0, 0.1)
    assert reached(run, "seconds", 1) == reached(run, "seconds", 2) == run["curve"][1]
    assert reached(run, "samples", 2) == run["curve"][2]
    assert reached(a_run("nft", 0, 0.1, failed="nan"), "samples", 2) is None


def test_methods_are_compared_at_equal_seconds_and_at_equal_samples() -> None:
    summary = summarise(document(a_run("nft", 0, 0.1), a_run("control", 0, -0.1), a_run("nft", 1, 0.2)))
    nft = summary["methods"]["nft"]
    assert list(summary["methods"]) == ["nft", "control"]
    assert nft["at"]["seconds"]["reward"] == {"mean": pytest.approx(0.65), "low": 0.6, "high": 0.7}
    assert nft["at"]["seconds"]["samples"]["mean"] == 4
    assert nft["at"]["samples"]["reward"] == {"mean": pytest.approx(0.8), "low": 0.7, "high": 0.9}
    assert nft["at"]["samples"]["seconds"]["mean"] == 21
    assert [p["reward"]["mean"] for p in nft["curves"]["samples"]] == pytest.approx([0.5, 0.65, 0.8])
    assert nft["cost"]["rss_peak_mb"] == {"mean": 300.5, "low": 300.0, "high": 301.0}
    assert nft["guided"][0]["guidance"] == 3.0
    assert summary["methods"]["control"]["at"]["samples"]["reward"]["mean"] == pytest.approx(0.3)
    assert summary["base"]["reward"]["mean"] == 0.5


def test_a_failed_run_counts_as_far_as_it_went() -> None:
    nft = summarise(document(a_run("nft", 0, 0.1), a_run("nft", 1, 0.3, failed="nan")))["methods"]["nft"]
    assert (nft["runs"], nft["failed"]) == (2, 1)
    assert nft["at"]["seconds"]["reward"]["high"] == 0.8
    assert nft["at"]["samples"]["reward"] == {"mean": 0.7, "low": 0.7, "high": 0.7}


def test_guidance_alone_has_its_base_too() -> None:
    summary = summarise(document(guided(0), guided(1)))
    assert summary["methods"] == {}
    assert summary["base"]["reward"]["mean"] == pytest.approx(0.6)
    assert list(summary["guidance"]) == ["1", "3"]
    assert summary["guidance"]["3"]["reward"]["mean"] == pytest.approx(0.8)
    assert summary["guidance"]["3"]["forwards"]["mean"] == 10
