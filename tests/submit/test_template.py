"""Places in a text: filled once, all of them, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from nftctl.submit import template


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(template, "FOLDER", tmp_path)
    (tmp_path / "t").write_text("a @one@ b @one@\n  @many@\nmail x@y.z @@one@\nend ${n[@]} @\n")
    return tmp_path


def test_lines_keep_their_place_and_values_are_not_looked_into() -> None:
    filled = template.fill("t", {"one": "@many@", "many": "p\n\n  q"})
    assert filled == "a @many@ b @many@\n  p\n\n    q\nmail x@y.z @@many@\nend ${n[@]} @\n"
    assert template.fill("t", {"one": "1", "many": ""}) == "a 1 b 1\nmail x@y.z @1\nend ${n[@]} @\n"


@pytest.mark.parametrize("values", [{"one": "1"}, {"many": "1"}, {"one": "1", "many": "2", "more": "3"}])
def test_a_place_without_a_value_and_a_value_without_a_place_are_mistakes(values: dict[str, str]) -> None:
    with pytest.raises(KeyError):
        template.fill("t", values)
