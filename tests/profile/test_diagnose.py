"""Places and wording: every mistake of a file at once, each with its line, its column and the likely fix."""

import sys
import tomllib
from pathlib import Path

import pytest

from nftctl.errors import Finding, ProfileRefused
from nftctl.profile.diagnose import format_finding
from nftctl.profile.load import load_profile
from nftctl.profile.positions import Positions

NINE_FAULTS = """\
# nine mistakes, one to a line
[job]
nam = "x"

[rl]
modality = "image"
kl_bta = 0
beta = "0.1"
group_size = true
r_map = "liner"
old = { decai = "copy", build_old = "yes" }

[modle]
height = 512

[optimizer]
guidance = 3.0
"""


def findings_of(text: str) -> list[Finding]:
    Path("profile.toml").write_text(text)
    with pytest.raises(ProfileRefused) as caught:
        load_profile(Path("profile.toml"), env={})
    return caught.value.findings


def test_nine_faults_give_nine_sorted_findings(place: Path) -> None:
    assert [format_finding(finding) for finding in findings_of(NINE_FAULTS)] == [
        "profile.toml:3:1: error[unknown-key]: job.nam is not a known key\n  help: did you mean job.name?",
        "profile.toml:7:1: error[unknown-key]: rl.kl_bta is not a known key\n  help: did you mean rl.kl_beta?",
        'profile.toml:8:1: error[invalid-type]: rl.beta must be a number, got "0.1"\n  help: write 0.1 without quotes',
        "profile.toml:9:1: error[invalid-type]: rl.group_size must be a whole number, got true",
        'profile.toml:10:1: error[invalid-value]: rl.r_map must be "linear" or "sigmoid", got "liner"\n'
        '  help: did you mean "linear"?',
        "profile.toml:11:9: error[unknown-key]: rl.old.decai is not a known key\n  help: did you mean rl.old.decay?",
        'profile.toml:11:25: error[invalid-type]: rl.old.build_old must be true or false, got "yes"',
        "profile.toml:13:1: error[unknown-key]: modle is not a known table or key\n  help: did you mean model?",
        "profile.toml:17:1: error[unknown-key]: optimizer.guidance is not a known key\n"
        "  help: did you mean rl.guidance or eval.guidance?",
    ]


def test_the_form_of_the_specified_example(place: Path) -> None:
    (finding,) = findings_of("\n\n\n\n[rl]\nkl_bta = 0\n")
    assert format_finding(finding) == (
        "profile.toml:6:1: error[unknown-key]: rl.kl_bta is not a known key\n  help: did you mean rl.kl_beta?"
    )


def test_findings_without_a_place() -> None:
    assert format_finding(Finding("code", "rl.beta", "a sentence")) == "error[code]: a sentence"
    warning = Finding("code", "rl.beta", "a sentence", severity="warning", origin="--set rl.beta=x")
    assert format_finding(warning) == "--set rl.beta=x: warning[code]: a sentence"


def test_names_and_values_stay_on_one_line(place: Path) -> None:
    found = findings_of('rl."a\\nb" = 1\njob.name = 1\nrl.beta = """x\ny"""\n')
    assert [f.line for f in found] == [1, 2, 3]
    assert not any("\n" in f.message + f.help for f in found)


def test_undecodable_bytes_can_be_printed(place: Path) -> None:
    Path("profile.toml").write_text("rl.beta = 1\n")
    with pytest.raises(ProfileRefused) as caught:
        load_profile(
            Path("profile.toml"), env={"NFTCTL_JOB__NAME": "a\udcff", "NFTCTL_\udcff": "1"}, sets=["x\udcff=1"]
        )
    text = "\n".join(map(format_finding, caught.value.findings))
    assert text.isascii()
    assert len(caught.value.findings) == 3


def test_missing_keys_point_at_their_header(place: Path) -> None:
    (finding,) = findings_of("[[reward.providers]]\nname = 'a'\n\n  [[reward.providers]]\nurl = 'u'\n")
    assert (finding.code, finding.key, finding.line, finding.column) == ("missing-key", "reward.providers.1.name", 4, 3)


def test_near_misses_look_at_siblings_first(place: Path) -> None:
    found = findings_of("[eval]\nstep = 1\nlora = 1\nzzz = 1\n[reward]\nweight = 1\n[checkpoint]\nzzz = 1\n")
    assert [f.help for f in found] == [
        "did you mean eval.steps?",
        "known of eval: prompt_file, every, samples_per_prompt, seed, steps, guidance, weights, providers",
        "known of eval: prompt_file, every, samples_per_prompt, seed, steps, guidance, weights, providers",
        "did you mean reward.providers.0.weight or eval.providers.0.weight?",
        "known of checkpoint: every, keep_last, keep_every",
    ]


TOML_OF_ALL_KINDS = '''\
top = 1
"quoted key" = 2
a.b . "c.d" = { e = 1, f.g = [ {h = 1}, # comment
   {h = 2} ] }
text = """
[not.a.table]
k = 1
"""
[ table . sub ]
  e = "é"
"ü" = 1
[[x.y]]
k = 1
[x.y.z]
k = 2
[[x.y]]
k = 3
[[x.y.w]]
k = 4
'''


def test_positions_of_every_kind_of_key() -> None:
    assert tomllib.loads(TOML_OF_ALL_KINDS)
    positions = Positions(TOML_OF_ALL_KINDS)
    expected = {
        ("top",): (1, 1),
        ("quoted key",): (2, 1),
        ("a", "b", "c.d"): (3, 1),
        ("a", "b", "c.d", "e"): (3, 17),
        ("a", "b", "c.d", "f", "g", 0, "h"): (3, 33),
        ("a", "b", "c.d", "f", "g", 1): (4, 4),
        ("a", "b", "c.d", "f", "g", 1, "h"): (4, 5),
        ("text",): (5, 1),
        ("table", "sub"): (9, 1),
        ("table", "sub", "e"): (10, 3),
        ("table", "sub", "ü"): (11, 1),
        ("x", "y"): (12, 1),
        ("x", "y", 0): (12, 1),
        ("x", "y", 0, "k"): (13, 1),
        ("x", "y", 0, "z", "k"): (15, 1),
        ("x", "y", 1): (16, 1),
        ("x", "y", 1, "k"): (17, 1),
        ("x", "y", 1, "w", 0, "k"): (19, 1),
        ("x", "y", 1, "absent"): (16, 1),
        ("table",): (9, 1),
        ("nowhere", "k"): None,
    }
    assert {path: positions.find(path) for path in expected} == expected


def test_columns_count_characters() -> None:
    assert Positions('k = {"ü" = "ééé", b = 1}').find(("k", "b")) == (1, 19)


def test_without_the_grammar_the_key_alone_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    (finding,) = findings_of("[rl]\nkl_bta = 0\n")
    assert (finding.line, finding.column) == (None, None)
    assert format_finding(finding).startswith("profile.toml: error[unknown-key]: rl.kl_bta ")
