"""What is documented is what is: generated files are fresh, complete and say what the program does."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from nftctl.cli import reference
from nftctl.cli.app import COMMANDS
from nftctl.cli.online import RULES as ONLINE
from nftctl.cli.validate import every_rule
from nftctl.engine.alarms import ADVICE
from nftctl.profile.keys import dotted, leaves
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.profile.preflight import check
from nftctl.profile.reference import JUDGED, json_schema, keys, type_text
from nftctl.profile.schema import Profile
from nftctl.run.identity import identity_document, seed_contract
from nftctl.run.metrics import METRICS

from .program import ROOT, nftctl


@pytest.fixture(scope="module")
def outputs() -> dict[Path, str]:
    return reference.outputs(ROOT)


@pytest.mark.parametrize("name", ["docs/configuration.md", "docs/metrics.md", "docs/profile.schema.json", "README.md"])
def test_a_generated_file_is_fresh(outputs: dict[Path, str], name: str) -> None:
    assert (ROOT / name).read_text() == outputs[ROOT / name], "run `make docs`"


def test_the_readme_holds_the_help_of_every_command(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    for command in ((), *((name,) for name in COMMANDS)):
        shown = reference.help_text(*command)
        assert f"```text\n{shown}```\n" in readme
        assert max(map(len, shown.splitlines())) <= 100
    assert f"```text\n{nftctl('launch', '-h', cwd=tmp_path, env={'COLUMNS': '100'}).stdout}```\n" in readme
    assert f"```sh\n{(ROOT / 'docs/ci.sh').read_text()}```\n" in readme


def test_stale_files_are_named_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "ci.sh").write_text("#!/bin/sh\n")
    readme = tmp_path / "README.md"
    marks = "".join(f"<!-- {edge} {mark} -->\n" for mark in ("help", "ci") for edge in ("begin", "end"))
    readme.write_text(f"before\n{marks}after\n")
    assert reference.main(["--check", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("is stale: run make docs") == 4
    assert readme.read_text() == f"before\n{marks}after\n"
    assert reference.main([str(tmp_path)]) == 0
    assert reference.main(["--check", str(tmp_path)]) == 0
    assert readme.read_text().startswith("before\n<!-- begin help -->\n```text\nUsage: nftctl ")
    assert readme.read_text().endswith("```sh\n#!/bin/sh\n```\n<!-- end ci -->\nafter\n")
    for text in ("no marks", marks + marks):
        with pytest.raises(LookupError, match="once each"):
            reference.between(text, "help", "x")


def test_the_page_has_every_key_and_every_rule(outputs: dict[Path, str]) -> None:
    page = outputs[ROOT / "docs" / "configuration.md"]
    rows = re.findall(r"^\| `([\w.]+)`<br>`(NFTCTL_\w+)` \|", page, re.MULTILINE)
    assert sorted(key for key, _ in rows) == sorted(dotted(path) for path in leaves())
    for key, variable in rows:
        assert variable == "NFTCTL_" + key.upper().replace(".", "__")
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE) == [
        *(rule.code for rule in every_rule()),
        *ONLINE,
    ]
    beta = "| `rl.beta`<br>`NFTCTL_RL__BETA` | number above 0 | `1.0` | Sharpness of the implicit velocities. "
    assert beta in page
    assert "| `rl.max_steps`<br>`NFTCTL_RL__MAX_STEPS` | whole number | unset | " in page
    assert "As a whole it is judged by `reward-missing`." in page
    # Every row of every table has as many cells as its head.
    assert {line.count(" | ") for line in page.splitlines() if line.startswith("| `") and "<br>" in line} == {5}


def test_the_variables_on_the_page_work(outputs: dict[Path, str]) -> None:
    variables = re.findall(r"<br>`(NFTCTL_\w+)`", outputs[ROOT / "docs" / "configuration.md"])
    # The profile's own values, through the environment: a variable that named no key would be refused.
    tiny = load_profile(bundled_profiles()["tiny_t2i_cpu"], env={}).profile
    env = {}
    for key in keys():
        if key.path[:2] == ("eval", "providers"):  # it names none, so there is no first entry to set again
            continue
        value: Any = tiny.model_dump()
        for step in key.path:
            value = value[step]
        if value is not None:
            env[key.variable] = (
                value if isinstance(value, str) else str(value).replace("True", "true").replace("False", "false")
            )
    assert set(env) < set(variables)
    assert len(env) >= 80
    assert load_profile(bundled_profiles()["tiny_t2i_cpu"], env=env).profile == tiny


FAULTS = {
    "rl.init_from=nowhere": {"init-from-missing"},
    "rl.scheduler_type=euler": {"sampler-type"},
    "rl.old.update_every=0": {"moving-old-cadence"},
    "rl.advantage_high=-1": {"advantage-bounds"},
    "rl.guidance=0": {"guidance-zero"},
    "grid.shapes={policy=[1,2]}": {"role-shape"},
    "model.height=9": {"rl-profile-contradicted"},
    'model.lora.targets=["to_q"]': {"lora-touches-prompt-encoder"},
    'model.lora.targets=["/(/"]': {"lora-pattern"},
    "reward.providers=[]": {"reward-missing"},
    "reward.providers.0.scorer=x": {"reward-scorer-unknown"},
    "reward.deadline_s=500": {"grid-timeout"},
    "eval.prompt_file=nowhere.txt": {"prompt-file-missing"},
    "data.rows_per_step=1000": {"prompt-file-short"},
    'job.name="a/b"': {"job-name"},
}


@pytest.mark.parametrize(("fault", "codes"), FAULTS.items())
def test_a_rule_judges_the_keys_that_the_page_says(fault: str, codes: set[str]) -> None:
    found = check(load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=[fault], env={}))
    assert {finding.code for finding in found} >= codes
    for finding in found:
        assert finding.key in JUDGED[finding.code]


def test_every_rule_is_on_the_page_with_keys_that_exist() -> None:
    assert set(JUDGED) == {rule.code for rule in every_rule()}
    known = {dotted(path) for path in leaves()} | {"reward.providers", "eval.providers"}
    assert {key for judged in JUDGED.values() for key in judged} <= known


def test_the_identity_column_is_what_the_identity_does() -> None:
    standings = reference.identity_standings([key.name for key in keys()])
    assert {standings[key] for key in ("rl.seed", "model.height", "data.shuffle")} == {"seeds"}
    assert {standings[key] for key in ("rl.beta", "reward.providers.0.weight", "job.deterministic")} == {"yes"}
    assert {standings[key] for key in ("rl.init_from", "data.prompt_file")} == {"content"}
    assert {standings[key] for key in ("checkpoint.every", "reward.providers.0.url", "rl.max_steps")} == {"no"}
    judge = {"providers": [{"name": "judge"}]}
    dump = Profile.model_validate({"reward": judge, "eval": judge}).model_dump()

    def documents(profile: dict[str, Any]) -> tuple[dict[str, object], dict[str, object]]:
        contract = seed_contract(profile, prompt_hash="p")
        return contract, identity_document(profile, base_fingerprint="b", prompt_hash="p", revisions={})

    before = documents(dump)
    for key in keys():
        changed = copy.deepcopy(dump)
        here: Any = changed
        for step in key.path[:-1]:
            here = here[step]
        here[key.path[-1]] = "changed"
        moved = tuple(was != now for was, now in zip(before, documents(changed), strict=True))
        expected = {"seeds": (True, True), "yes": (False, True), "content": (False, False), "no": (False, False)}
        assert moved == expected[standings[key.name]], key.name


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    Draft202012Validator.check_schema(json_schema())
    return Draft202012Validator(json_schema())


@pytest.mark.parametrize("name", bundled_profiles())
def test_the_schema_accepts_what_ships(schema: Draft202012Validator, name: str) -> None:
    schema.validate(tomllib.loads(bundled_profiles()[name].read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "[rl]\nkl_bta = 1", "[rll]", "[rl.old]\ndecay = 'linaer'", "[rl]\nbeta = 0", "[rl]\nbeta = '1'", "extends = 3",
        "[[reward.providers]]\nurl = 'http://x'", "[rl]\nextends = 'x'", "[rl]\ntrain_t_range = [0.0]",
        "[model.lora]\nranks = 3", "[rl]\nseed = 9223372036854775808",
    ],
)  # fmt: skip
def test_the_schema_refuses_what_the_program_refuses(schema: Draft202012Validator, text: str, tmp_path: Path) -> None:
    from nftctl.errors import ProfileRefused

    assert not schema.is_valid(tomllib.loads(text))
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ProfileRefused):
        load_profile(path, env={})


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(below)


def test_the_schema_is_closed_described_and_without_null() -> None:
    tables = [node for node in nodes(json_schema()) if isinstance(node.get("properties"), dict)]
    assert len(tables) == 17
    for table in tables:
        assert table["additionalProperties"] is False
        assert table["description"]
        assert all("description" in node or "$ref" in node or "items" in node for node in table["properties"].values())
    assert not any(node.get("type") == "null" or node.get("default", 0) is None for node in nodes(json_schema()))


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**63}, "whole number at least 0 and below 2^63"),
        ({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}, "array of 2 numbers"),
        ({"enum": ["a", "b"], "type": "string"}, '"a" or "b"'),
        ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, "true or false, or text"),
        (
            {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}},
            "table of arrays of whole numbers",
        ),
    ],
)
def test_types_in_words(node: dict[str, Any], words: str) -> None:
    assert type_text(node) == words


def test_the_page_of_metrics_has_every_metric_and_every_alarm(outputs: dict[Path, str]) -> None:
    page = outputs[ROOT / "docs" / "metrics.md"]
    rows = re.findall(r"^\| `([^`]+)`(?:<br>in (\S+))? \|", page, re.MULTILINE)
    names = [name for name, _ in rows]
    assert sorted(names) == sorted([*(metric.name for metric in METRICS), *ADVICE])
    assert [file for _, file in rows if file] == ["metrics.jsonl", "evaluations.jsonl"]
    # Every row of a table of metrics has as many cells as its head.
    assert {line.count(" | ") for line in page.splitlines() if re.match(r"\| `\w+/", line)} == {4}
