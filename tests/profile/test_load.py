"""Layers and origins: who wins, who is remembered, and what is never read."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import nftctl
from nftctl.errors import Finding, ProfileRefused
from nftctl.profile.load import bundled_profiles, find_profile, load_profile, load_resolved
from nftctl.profile.preflight import locate_origins
from nftctl.profile.schema import Profile


def refused(**options: object) -> list[Finding]:
    with pytest.raises(ProfileRefused) as caught:
        load_profile(Path("profile.toml"), **{"env": {}, **options})
    return caught.value.findings


def test_sources_drop_out_one_by_one(place: Path) -> None:
    file, env, sets, flags = Path("profile.toml"), {"NFTCTL_MODEL__LORA__RANK": "8"}, ["model.lora.rank=12"], {}
    file.write_text("[model.lora]\nrank = 2\n")
    flags = {"model.lora.rank": 16}
    loads = [
        load_profile(file, env=env, sets=sets, flags=flags),
        load_profile(file, env=env, sets=sets),
        load_profile(file, env=env),
        load_profile(file, env={}),
    ]
    file.write_text("[job]\n[rl]\nbeta = 1\n")
    loads.append(load_profile(file, env={}))
    assert [r.profile.model.lora.rank for r in loads] == [16, 12, 8, 2, 16]
    assert [r.origins["model.lora.rank"].source for r in loads] == ["flag", "set", "env", "profile", "default"]


def test_flag_over_environment_over_file_over_default(place: Path) -> None:
    # 16, 8, 2, 4: flag, environment, file, default of the same nested key
    file, env = Path("profile.toml"), {"NFTCTL_RL__GROUP_SIZE": "8"}
    file.write_text("[rl]\ngroup_size = 2\n")
    found = [
        load_profile(file, env=env, flags={"rl.group_size": 16}).profile.rl.group_size,
        load_profile(file, env=env, flags={"rl.group_size": None}).profile.rl.group_size,
        load_profile(file, env={}).profile.rl.group_size,
    ]
    file.write_text("[rl]\nbeta = 1\n")
    found.append(load_profile(file, env={}).profile.rl.group_size)
    assert found == [16, 8, 2, 4]


def test_every_value_has_an_origin(load: Callable) -> None:
    shapes = {"policy": [1, 4], "rollout": [1, 4]}
    sets = ["rl.beta=2", "grid.shapes.policy=[1, 4]"]
    resolved = load({"grid.shapes": shapes}, sets=sets, flags={"rl.max_steps": 7}, env={"NFTCTL_RL__SEED": "3"})

    def dotted_leaves(value: object, above: str) -> list[str]:
        if isinstance(value, dict) and value:
            return [leaf for key, item in value.items() for leaf in dotted_leaves(item, f"{above}.{key}")]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return [leaf for n, item in enumerate(value) for leaf in dotted_leaves(item, f"{above}.{n}")]
        return [above.removeprefix(".")]

    assert list(resolved.origins) == dotted_leaves(resolved.profile.model_dump(), "")
    origins = locate_origins(resolved)
    assert (origins["rl.modality"].text, origins["rl.modality"].line) == ("profile.toml", 1)
    assert (origins["reward.providers.0.url"].line, origins["reward.providers.0.url"].column) == (10, 1)
    assert (origins["grid.shapes.policy"].source, origins["grid.shapes.policy"].line) == ("set", None)
    assert (origins["grid.shapes.rollout"].source, origins["grid.shapes.rollout"].line) == ("profile", 7)
    assert (origins["rl.beta"].text, origins["rl.beta"].argument) == ("--set", "rl.beta=2")
    assert origins["rl.max_steps"].text == "--steps"
    assert origins["rl.seed"].text == "env NFTCTL_RL__SEED"
    assert origins["rl.kl_beta"].source == "default"
    assert resolved.text == Path("profile.toml").read_text()


def test_an_empty_list_of_providers_is_a_leaf(load: Callable) -> None:
    assert load({}, providers=[]).origins["reward.providers"].source == "default"


def test_tables_merge_key_by_key(place: Path) -> None:
    Path("base.toml").write_text('[rl.old]\nupdate_every = 4\ndecay = "linear"\n')
    file = Path("profile.toml")
    file.write_text('extends = "base.toml"\n[rl.old]\ndecay = "delayed"\n')
    resolved = load_profile(file, env={})
    assert (resolved.profile.rl.old.update_every, resolved.profile.rl.old.decay) == (4, "delayed")
    assert resolved.origins["rl.old.update_every"].source == "base"
    assert resolved.origins["rl.old.update_every"].text == "base.toml"
    assert resolved.origins["rl.old.decay"].source == "profile"
    by_set = load_profile(Path("base.toml"), env={}, sets=["rl.old.decay=copy"]).profile.rl.old
    assert (by_set.update_every, by_set.decay) == (4, "copy")
    by_table = load_profile(Path("base.toml"), env={}, sets=['rl.old={decay = "copy"}']).profile.rl.old
    assert (by_table.update_every, by_table.decay) == (4, "copy")


def test_maps_and_lists_are_replaced_whole_but_can_be_reached_into(place: Path) -> None:
    Path("base.toml").write_text("grid.shapes = {policy = [1, 4], rollout = [1, 4]}\nmodel.lora.targets = ['a', 'b']\n")
    Path("profile.toml").write_text("extends = 'base.toml'\ngrid.shapes = {policy = [1, 2]}\nmodel.lora.targets = []\n")
    over = load_profile(Path("profile.toml"), env={}).profile
    assert (over.grid.shapes, over.model.lora.targets) == ({"policy": [1, 2]}, [])
    reached = load_profile(Path("base.toml"), env={}, sets=["grid.shapes.policy=[1, 8]"]).profile
    assert reached.grid.shapes == {"policy": [1, 8], "rollout": [1, 4]}
    with pytest.raises(ProfileRefused) as caught:
        load_profile(Path("base.toml"), env={}, sets=["grid.shapes.policy=[x]", "grid.shapes.other=['y']"])
    found = [(f.key, f.origin) for f in caught.value.findings]
    assert found == [("grid.shapes", "--set grid.shapes.policy=[x]"), ("grid.shapes", "--set grid.shapes.other=['y']")]
    replaced = load_profile(
        Path("base.toml"), env={}, sets=["grid.shapes.policy=[1, 8]", "grid.shapes={rollout=[1, 2]}"]
    )
    assert replaced.profile.grid.shapes == {"rollout": [1, 2]}
    assert {o.argument for key, o in replaced.origins.items() if "shapes" in key} == {"grid.shapes={rollout=[1, 2]}"}


def test_overrides_reach_array_entries(load: Callable) -> None:
    resolved = load(
        {},
        sets=["reward.providers.0.revision=2026", "reward.providers.1.weight=0"],
        env={
            "NFTCTL_REWARD__PROVIDERS__0__URL": "http://example.org",
            "NFTCTL_REWARD__PROVIDERS__1__NAME": "second",
        },
    )
    first, second = resolved.profile.reward.providers
    assert (first.name, first.url, first.revision) == ("judge", "http://example.org", "2026")
    assert (second.name, second.weight) == ("second", 0.0)
    assert resolved.origins["reward.providers.0.url"].text == "env NFTCTL_REWARD__PROVIDERS__0__URL"
    assert resolved.origins["reward.providers.0.name"].source == "profile"


def test_entries_are_appended_in_order_of_their_number(place: Path) -> None:
    Path("profile.toml").write_text("[job]\nname = 'x'\n")
    env = {f"NFTCTL_REWARD__PROVIDERS__{n}__NAME": f"p{n}" for n in range(11)}
    names = [p.name for p in load_profile(Path("profile.toml"), env=env).profile.reward.providers]
    assert names == [f"p{n}" for n in range(11)]


def test_an_entry_far_past_the_end_is_refused(load: Callable) -> None:
    with pytest.raises(ProfileRefused) as caught:
        load({}, sets=["reward.providers.2.url=http://x"])
    (finding,) = caught.value.findings
    assert (finding.key, finding.help) == ("reward.providers.2.url", "the next one is reward.providers.1")


def test_an_entry_without_a_name_is_blamed_on_whoever_made_it(place: Path) -> None:
    Path("profile.toml").write_text("[[reward.providers]]\nurl = 'u'\n")
    found = refused(sets=["reward.providers.1.url=v"], env={"NFTCTL_REWARD__PROVIDERS__0__WEIGHT": "2"})
    assert [(f.key, f.code, f.origin, f.line) for f in found] == [
        ("reward.providers.0.name", "missing-key", "profile.toml", 1),
        ("reward.providers.1.name", "missing-key", "--set reward.providers.1.url=v", None),
    ]


def test_a_higher_file_replaces_the_providers(place: Path) -> None:
    Path("base.toml").write_text("[[reward.providers]]\nname = 'a'\nurl = 'u'\n[[reward.providers]]\nname = 'b'\n")
    Path("profile.toml").write_text("extends = 'base.toml'\n[[reward.providers]]\nname = 'c'\n")
    resolved = load_profile(Path("profile.toml"), env={})
    assert [(p.name, p.url) for p in resolved.profile.reward.providers] == [("c", "")]
    assert resolved.origins["reward.providers.0.url"].source == "default"


def test_a_wrong_value_in_the_file_is_not_hidden_by_an_override(place: Path) -> None:
    Path("profile.toml").write_text('[rl]\ngroup_size = "four"\n')
    (finding,) = refused(sets=["rl.group_size=4"])
    assert (finding.origin, finding.line, finding.key) == ("profile.toml", 2, "rl.group_size")
    Path("profile.toml").write_text("[rl]\ngroup_size = 4\n")
    (finding,) = refused(env={"NFTCTL_RL__GROUP_SIZE": "four"}, sets=["rl.group_size=4"])
    assert finding.origin == "env NFTCTL_RL__GROUP_SIZE"
    (finding,) = refused(sets=["rl.group_size=four", "rl.group_size=4"])
    assert finding.origin == "--set rl.group_size=four"


def test_dot_env_and_foreign_variables_are_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("profile.toml").write_text("[rl]\nbeta = 1\n")
    Path(".env").write_text("GITHUB_TOKEN=x\nRL__BETA=9\nNFTCTL_RL__BETA=9\nNFTCTL_NONSENSE=1\n")
    monkeypatch.setenv("RL__BETA", "9")
    assert load_profile(Path("profile.toml")).profile.rl.beta == 1.0
    monkeypatch.setenv("NFTCTL_RL__BETA", "9")
    assert load_profile(Path("profile.toml")).profile.rl.beta == 9.0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("optimizer.lr=1e-4", 1e-4),
        ("rl.beta=1", 1.0),
        ("rl.uniform_timestep=true", True),
        ("rl.timestep_source=grid", "grid"),
        ('rl.timestep_source="grid"', "grid"),
        ("job.name=2026-01-02", "2026-01-02"),
        ("job.name=true", "true"),
        ("job.name=a#b", "a#b"),
        ("job.name= a=b ", "a=b"),
        ("job.name=", ""),
        ('model.lora.targets=["x"]', ["x"]),
        ("rl.train_t_range=[0, 1]", [0.0, 1.0]),
    ],
)
def test_override_values_are_toml(load: Callable, argument: str, value: object) -> None:
    section, name = argument.partition("=")[0].rsplit(".", 1)
    table: object = load({}, sets=[argument]).profile
    for part in section.split("."):
        table = getattr(table, part)
    found = getattr(table, name)
    assert found == value
    assert type(found) is type(value)
    variable = "NFTCTL_" + argument.partition("=")[0].replace(".", "__").upper()
    by_env = load({}, env={variable: argument.partition("=")[2].strip()}).profile
    for part in [*section.split("."), name]:
        by_env = getattr(by_env, part)
    assert by_env == value


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ('optimizer.lr = "1e-4"', "optimizer.lr", "a number"),
        ("rl.group_size = 4.5", "rl.group_size", "a whole number"),
        ("rl.group_size = true", "rl.group_size", "a whole number"),
        ("rl.beta = true", "rl.beta", "a number"),
        ("rl.beta = nan", "rl.beta", "a finite number"),
        ("rl.beta = inf", "rl.beta", "a finite number"),
        ("rl.beta = 1e999", "rl.beta", "a finite number"),
        ("rl.beta = 2026-01-01", "rl.beta", "a number"),
        ("rl.beta = -1", "rl.beta", "greater than 0"),
        ("rl.seed = 1" + "0" * 30, "rl.seed", "fit in 64 bits"),
        ("rl.max_steps = 1" + "0" * 30, "rl.max_steps", "fit in 64 bits"),
        ("rl.r_map = 'liner'", "rl.r_map", '"linear" or "sigmoid"'),
        ("rl.train_t_range = [0, 'x']", "rl.train_t_range", "a number in every place"),
        ("rl.train_t_range = [0]", "rl.train_t_range", "an array of 2 items"),
        ("rl = 5", "rl", "a table"),
        ("reward.providers = {}", "reward.providers", "an array of tables"),
        ("reward.providers = [1]", "reward.providers.0", "a table"),
        ("grid.shapes = {policy = ['x']}", "grid.shapes", "a whole number in every place"),
    ],
)
def test_wrong_types_name_key_and_expected_type(place: Path, line: str, key: str, expected: str) -> None:
    Path("profile.toml").write_text(f"job.name = 'x'\n{line}\n")
    (finding,) = refused()
    assert (finding.key, finding.line, finding.column) == (key, 2, 1 if "providers = [" not in line else 21)
    assert f"must be {expected}" in finding.message or f"must {expected}" in finding.message


def test_unknown_keys_are_refused_wherever_they_come_from(place: Path) -> None:
    Path("profile.toml").write_text("[rl]\nkl_bta = 0\n[rll]\nbeta = 1\n")
    found = refused(
        sets=["rl.kl_bta=0", "extends=x", "rl.beta.x=1", "reward.providers.url=x", "=3", "rl.beta"],
        env={"NFTCTL_RL__KL_BTA": "0", "NFTCTL_REWARD_TOKN": "secret", "NFTCTL_rl__beta": "1", "NFTCTL_": "1"},
    )
    assert [(f.origin, f.key, f.code) for f in found] == [
        ("profile.toml", "rl.kl_bta", "unknown-key"),
        ("profile.toml", "rll", "unknown-key"),
        ("env NFTCTL_", '""', "unknown-key"),
        ("env NFTCTL_REWARD_TOKN", "reward_tokn", "unknown-key"),
        ("env NFTCTL_RL__KL_BTA", "rl.kl_bta", "unknown-key"),
        ("env NFTCTL_rl__beta", "rl.beta", "unknown-key"),
        ("--set rl.kl_bta=0", "rl.kl_bta", "unknown-key"),
        ("--set extends=x", "extends", "unknown-key"),
        ("--set rl.beta.x=1", "rl.beta.x", "unknown-key"),
        ("--set reward.providers.url=x", "reward.providers.url", "unknown-key"),
        ("--set =3", "", "invalid-set"),
        ("--set rl.beta", "", "invalid-set"),
    ]
    assert [f.help for f in found[:6]] == [
        "did you mean rl.kl_beta?",
        "did you mean rl?",
        "variables are named NFTCTL_SECTION__KEY",
        "did you mean NFTCTL_REWARD_TOKEN?",
        "did you mean NFTCTL_RL__KL_BETA?",
        "did you mean NFTCTL_RL__BETA?",
    ]
    assert not any("secret" in f.message + f.help for f in found)


def test_the_three_special_variables_are_no_keys(load: Callable) -> None:
    env = {"NFTCTL_PROFILE": "x", "NFTCTL_DEBUG": "1", "NFTCTL_REWARD_TOKEN": "SENTINEL"}
    assert "SENTINEL" not in repr(load({}, env=env))


@pytest.mark.parametrize(
    ("content", "code", "line_and_column"),
    [
        (None, "profile-missing", (None, None)),
        (b"", "profile-empty", (None, None)),
        (b"# nothing\n", "profile-empty", (None, None)),
        (b"\xef\xbb\xbf[rl]\nbeta = 1\n", "profile-encoding", (1, 1)),
        ("[job]\nname = 'caf\xe9'\n".encode("latin-1"), "profile-encoding", (2, 12)),
        (b"[rl]\nbeta = \n", "syntax", (2, 8)),
        (b"[rl]\nbeta = 1\nbeta = 2\n", "syntax", (3, 9)),
        (b"[rl]\nname = '''", "syntax", (2, 11)),
        (b"x = " + b"[" * 5000, "syntax", (None, None)),
        (b"x = " + b"1" * 5000, "syntax", (None, None)),
        (b"\x00", "syntax", (1, 1)),
    ],
)
def test_files_that_cannot_be_read(
    place: Path, content: bytes | None, code: str, line_and_column: tuple[int | None, int | None]
) -> None:
    if content is not None:
        Path("profile.toml").write_bytes(content)
    (finding,) = refused()
    assert (finding.code, finding.origin) == (code, "profile.toml")
    assert (finding.line, finding.column) == line_and_column
    if content is None:
        assert str(place / "profile.toml") in finding.message


def test_folders_and_unreadable_files(place: Path) -> None:
    Path("profile.toml").mkdir()
    assert [f.code for f in refused()] == ["profile-folder"]
    with pytest.raises(ProfileRefused) as caught:
        load_profile(Path("prompts.txt/profile.toml"), env={})
    assert [(f.code, f.message) for f in caught.value.findings] == [
        ("profile-unreadable", "the file cannot be read: Not a directory")
    ]


def test_windows_line_ends_are_fine(place: Path) -> None:
    Path("profile.toml").write_bytes(b"[rl]\r\nbeta = 2\r\nkl_beta = 0\r\n")
    resolved = load_profile(Path("profile.toml"), env={})
    assert (resolved.profile.rl.beta, resolved.profile.rl.kl_beta) == (2.0, 0.0)
    Path("profile.toml").write_bytes(b"[rl]\r\nbeta = 2\r\nkl_bta = 0\r\n")
    (finding,) = refused()
    assert (finding.line, finding.column) == (3, 1)


def test_extends_by_name_and_by_path(place: Path) -> None:
    (place / "sub").mkdir()
    Path("sub/root.toml").write_text("rl.beta = 2\nrl.seed = 1\nextends = 'tiny_t2i_cpu'\n")
    Path("sub/middle.toml").write_text("extends = 'root.toml'\nrl.seed = 2\n")
    Path("profile.toml").write_text("extends = 'sub/middle.toml'\nrl.group_size = 2\n")
    resolved = load_profile(Path("profile.toml"), env={})
    rl = resolved.profile.rl
    assert (rl.group_size, rl.seed, rl.beta, rl.sample_steps) == (2, 2, 2.0, 10)
    assert resolved.origins["rl.sample_steps"].text == str(bundled_profiles()["tiny_t2i_cpu"])
    assert list(resolved.texts) == ["profile.toml", "sub/middle.toml", "sub/root.toml", *list(resolved.texts)[3:]]


@pytest.mark.parametrize(
    ("extends", "code"),
    [
        ("'nope.toml'", "profile-missing"),
        ("'tiny_t2i_cp'", "profile-missing"),
        ("'profile.toml'", "extends-cycle"),
        ("'other.toml'", "extends-cycle"),
        ("3", "invalid-type"),
        ("''", "invalid-type"),
        ('"a\\u0000.toml"', "invalid-type"),
        ("'./sub'", "profile-folder"),
    ],
)
def test_extends_refused_at_its_line(place: Path, extends: str, code: str) -> None:
    (place / "sub").mkdir()
    Path("other.toml").write_text("extends = 'profile.toml'\n")
    Path("profile.toml").write_text(f"# a comment\nextends = {extends}\n")
    (finding,) = refused()
    assert finding.code == code
    where = ("other.toml", 1) if "other" in extends else ("profile.toml", 2)
    assert (finding.origin, finding.line, finding.column) == (*where, 1)


def test_a_syntax_error_does_not_hide_the_other_sources(place: Path) -> None:
    Path("profile.toml").write_text("[rl\n")
    assert [f.code for f in refused(sets=["rl.kl_bta=1"], env={"NFTCTL_RL__BETA": "x"})] == [
        "syntax",
        "invalid-type",
        "unknown-key",
    ]


def test_a_base_document_lies_below_the_files(place: Path) -> None:
    Path("profile.toml").write_text("rl.beta = 2\n")
    resolved = load_profile(Path("profile.toml"), env={}, base={"rl": {"beta": 3.0, "seed": 5}})
    assert (resolved.profile.rl.beta, resolved.profile.rl.seed) == (2.0, 5)
    assert resolved.origins["rl.seed"].source == "base"


def test_a_resolved_profile_loads_again(load: Callable) -> None:
    first = load({"grid.shapes": {"policy": [1, 4], "rollout": [1, 4]}})
    again = load_resolved(
        first.profile.model_dump(),
        name=first.name,
        text=first.text,
        sets=["rl.beta=2"],
        flags={"rl.max_steps": 9},
        env={},
    )
    assert again.profile.rl.beta == 2.0
    assert again.profile.rl.max_steps == 9
    assert again.profile.model_copy(update={"rl": first.profile.rl}) == first.profile
    assert (again.name, again.path, again.text) == ("profile", None, first.text)
    assert again.origins["rl.seed"].text == "profile.resolved.json"


def test_find_profile(place: Path) -> None:
    bundled = bundled_profiles()
    path, why = find_profile(None, {}, place)
    assert path == bundled["scenes_t2i_cpu"]
    assert "embedded default scenes_t2i_cpu" in why
    Path("profile.toml").write_text("rl.beta = 1\n")
    assert find_profile(None, {}, place) == (Path("profile.toml"), "using ./profile.toml, found in the working folder")
    path, why = find_profile(None, {"NFTCTL_PROFILE": "cosmos3_nft_t2i_public"}, place)
    assert path == bundled["cosmos3_nft_t2i_public"]
    assert "$NFTCTL_PROFILE" in why
    assert find_profile("sub/x.toml", {"NFTCTL_PROFILE": "y"}, place)[0] == Path("sub/x.toml")
    assert find_profile("x.toml", {}, place / "sub")[0] == place / "sub" / "x.toml"
    assert find_profile("tiny_t2i_cpu", {}, place)[0] == bundled["tiny_t2i_cpu"]
    with pytest.raises(ProfileRefused) as caught:
        find_profile("tiny_t2i_gpu", {}, place)
    assert caught.value.findings[0].help == "did you mean tiny_t2i_cpu?"
    with pytest.raises(ProfileRefused):
        find_profile("", {}, place)  # an unset shell variable must not mean the default
    assert find_profile("-", {}, place)[0] == Path("/dev/stdin")


def test_profiles_are_immutable(load: Callable) -> None:
    profile = load({}).profile
    assert isinstance(profile, Profile)
    with pytest.raises(ValueError, match="frozen"):
        profile.rl.beta = 2.0


def test_standard_input(place: Path) -> None:
    program = (
        "from nftctl.profile.load import load_profile, find_profile; from pathlib import Path\n"
        "path, _ = find_profile('-', {}, Path.cwd())\n"
        "resolved = load_profile(path, env={})\n"
        "print(resolved.name, resolved.profile.rl.beta, resolved.text)"
    )
    root = Path(nftctl.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program], input="rl.beta = 3", capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout == "stdin 3.0 rl.beta = 3\n"
