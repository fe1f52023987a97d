"""Tables say the summary's numbers in words."""

from __future__ import annotations

from typing import Any

from nftctl.learning.summary import summarise
from nftctl.learning.table import amount, markdown, share, tables
from tests.learning.test_summary import a_run, document, guided


def comparison(**failed: str) -> dict[str, Any]:
    found = document(a_run("nft", 0, 0.1), a_run("nft", 1, 0.2, **failed), a_run("control", 0, -0.1), guided(0))
    found["plan"] |= {
        "seconds": 10.0, "samples": 8, "seeds": [0, 1], "trials": 2, "rows_per_step": 2, "group_size": 2,
        "prompts": {"train": ["x"] * 40, "tuning": ["y"] * 8, "test": ["z"] * 12},
    }  # fmt: skip
    found |= {"profile": "mine", "measured": "So it was measured."}
    found["chosen"] = {"guidance": {"settings": {"guidance": 3.0}}, "nft": {"settings": {"lr": 0.001}, "trial": 1}}
    found["trials"] = [
        {"method": "guidance", "guided": guided(0)["guided"], "merit": None},
        {"method": "nft", "number": 0, "settings": {"lr": 0.01}, "merit": None},
        {"method": "nft", "number": 1, "settings": {"lr": 0.001, "timesteps": 4}, "merit": 0.625},
    ]
    return found | {"summary": summarise(found)}


def test_numbers() -> None:
    assert share({"mean": 0.65, "low": 0.6, "high": 0.7}) == "0.650 (0.600 to 0.700)"
    assert share({"mean": 0.5, "low": 0.5, "high": 0.5}) == "0.500"
    assert share(None) == amount(None) == "-"
    assert amount({"mean": 12345.6}) == "12,346"
    assert amount({"mean": 0.23456}) == "0.235"


def test_the_tables_of_a_comparison() -> None:
    seconds, samples, guidance, costs, tried = tables(comparison())
    assert seconds.title == "Equal wall-clock: 10 s of training"
    assert samples.title == "Equal samples: 8 samples"
    by_name = {row[0]: row for row in seconds.rows}
    assert list(by_name) == ["base", "DiffusionNFT", "control: DiffusionNFT, advantages permuted", "base, guidance 3"]
    assert by_name["DiffusionNFT"][1:6] == ("0.650 (0.600 to 0.700)",) * 3 + ("0.650", "4")
    assert by_name["base, guidance 3"][1] == "0.800"
    assert {row[0]: row[1] for row in samples.rows}["DiffusionNFT"] == "0.800 (0.700 to 0.900)"
    assert [row[0] for row in guidance.rows] == [
        "base, guidance 1", "base, guidance 3", "DiffusionNFT, last policy, guidance 3",
        "control: DiffusionNFT, advantages permuted, last policy, guidance 3",
    ]  # fmt: skip
    assert costs.rows[0] == ("DiffusionNFT", "1", "1", "1", "1", "300")
    assert list(tried.rows) == [
        ("DiffusionNFT", "lr 0.01", "failed"),
        ("DiffusionNFT", "lr 0.001, timesteps 4", "0.625 (chosen)"),
        ("guidance", "1", "0.600"),
        ("guidance", "3", "0.800 (chosen)"),
    ]
    for table in (seconds, samples, guidance, costs, tried):
        assert {len(row) for row in table.rows} == {len(table.head)}


def test_failures_stand_beside_the_name() -> None:
    seconds = tables(comparison(failed="nan"))[0]
    assert seconds.rows[1][0] == "DiffusionNFT (1 of 2 failed)"


def test_markdown_says_how_it_was_measured() -> None:
    text = markdown(comparison())
    assert "over 2 seeds, 2 trials for each method on 8 tuning prompts, test on 12 others" in text
    assert "So it was measured." in text
    assert "| DiffusionNFT | 0.650 (0.600 to 0.700) |" in text
    assert "| --- | ---: |" in text
