"""The two forms of a LoRA target, and that neither is ever taken for the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nftctl.profile.targets import is_pattern, malformed, matched, selects

NAMES = ["layers.0.attn.to_q", "layers.1.attn.to_q", "layers.10.attn.to_q", "layers.1.attn.to_out.0", "proj_in"]


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("to_q", [0, 1, 2]),
        ("attn.to_q", [0, 1, 2]),
        ("1.attn.to_q", [1]),
        ("proj_in", [4]),
        ("q", []),
        ("layers.*.attn.to_q", []),  # a star is no wildcard in an end of a name
        (r"/layers\.\d\.attn\.to_q/", [0, 1]),
        (r"/layers\.1.*/", [1, 2, 3]),
        ("/to_q/", []),
        (r"/layers\.1\.attn/", []),
        ("/.*to_q/", [0, 1, 2]),
        ("/proj_in|layers.0.*/", [0, 4]),
        ("/(?i)PROJ_IN/", [4]),
        ("/.*/", [0, 1, 2, 3, 4]),
    ],
)
def test_what_is_selected(target: str, found: list[int]) -> None:
    assert not malformed(target)
    assert [n for n, name in enumerate(NAMES) if selects(target, name)] == found
    assert matched([target], NAMES) == {target: len(found)}


@pytest.mark.parametrize(
    "target", ["/", "//", "/to_q", "/(/", "/[/", "/a{2,1}/", "/*/", "/a{99999999999999999999}/", "/\\/"]
)
def test_what_is_no_regular_expression_says_why_and_selects_nothing(target: str) -> None:
    assert malformed(target)
    assert not any(selects(target, name) for name in [*NAMES, target])


@given(st.text(alphabet=st.sampled_from("abz_019.*+?()[]{}|\\^$/"), max_size=12))
def test_only_a_slash_makes_a_regular_expression(target: str) -> None:
    assert is_pattern(target) == target.startswith("/")
    if not is_pattern(target):
        assert malformed(target) == ""
        assert selects(target, target)
        assert selects(target, f"layers.0.{target}")
    elif not malformed(target):
        assert target.endswith("/")
