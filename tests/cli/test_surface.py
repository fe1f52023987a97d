"""What people and scripts rely on: commands, options, exit codes, JSON keys. A change here changes the interface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from nftctl import __version__
from nftctl.cli.app import COMMANDS, EXIT_CODES, app
from nftctl.errors import ExitCode, NftctlError

from .program import nftctl, the_object

SURFACE = {
    "": (["--install-completion", "--json", "--show-completion", "--version"], []),
    "validate": (["--json", "--memory", "--online", "--rules", "--set", "--show-resolved"], ["PROFILE"]),
    "launch": (
        [
            "--auto-resume",
            "--dry-run",
            "--json",
            "--max-restarts",
            "--name",
            "--quiet",
            "--run-dir",
            "--set",
            "--steps",
            "-q",
        ],
        ["PROFILE"],
    ),
    "resume": (
        ["--dry-run", "--fork", "--json", "--max-restarts", "--quiet", "--set", "--steps", "-q"],
        ["CHECKPOINT"],
    ),
    "inspect-checkpoint": (["--diff", "--json", "--tensors", "--verify"], ["CHECKPOINT"]),
    "reward-ping": (
        [
            "--count",
            "--json",
            "--load",
            "--protocol",
            "--revision",
            "--reward-fn",
            "--score-key",
            "--timeout",
            "--url",
            "--wait",
        ],
        ["PROFILE"],
    ),
    "reward-serve": (["--host", "--port", "--revision", "--scorer", "--workers"], []),
    "profiles": (["--json", "--schema"], ["NAME"]),
    "init": (["--from", "--json"], ["PATH"]),
    "export": (["--base", "--json", "--to", "--weights"], ["CHECKPOINT", "OUT"]),
    "sample": (
        [
            "--base",
            "--device",
            "--guidance",
            "--images",
            "--json",
            "--out",
            "--prompt",
            "--prompt-file",
            "--seed",
            "--shift",
            "--steps",
            "--weights",
        ],
        ["CHECKPOINT"],
    ),
    "convert": (["--config", "--json", "--like", "--strip-prefix"], ["SRC", "DST"]),
    "bench": (
        [
            "--compare",
            "--json",
            "--output",
            "--quiet",
            "--ranks",
            "--set",
            "--steps",
            "--warm",
            "--write-base",
            "-q",
        ],
        ["PROFILE"],
    ),
    "bench learning": (
        [
            "--budget",
            "--jobs",
            "--json",
            "--methods",
            "--output",
            "--profile",
            "--quiet",
            "--samples",
            "--seeds",
            "--set",
            "--trials",
            "-q",
        ],
        [],
    ),
    "report": (["--compare", "--json", "--output"], ["RUN"]),
    "watch": (["--json", "--once"], ["RUN"]),
    "submit": (
        [
            "--address",
            "--cpus-per-node",
            "--dry-run",
            "--follow",
            "--gpus-per-node",
            "--grace",
            "--image",
            "--json",
            "--logs",
            "--max-restarts",
            "--memory-per-node",
            "--name",
            "--namespace",
            "--output",
            "--run-dir",
            "--sbatch",
            "--secret",
            "--set",
            "--setup",
            "--status",
            "--steps",
            "--stop",
            "--to",
            "--volume",
        ],
        ["PROFILE"],
    ),
}
"""Command -> options and arguments; every command has -h and --help besides."""

EXITS = {
    "OK": 0, "BUG": 1, "USAGE": 2, "PROFILE": 3, "REWARD": 4, "CHECKPOINT": 5, "RESUME": 6, "TRAINING": 7,
    "ENVIRONMENT": 8, "SIGINT": 130, "SIGTERM": 143,
}  # fmt: skip


def surface_of(command: object) -> tuple[list[str], list[str]]:
    context = command.make_context("x", [], resilient_parsing=True)  # type: ignore[attr-defined]
    shown = [p for p in command.get_params(context) if not getattr(p, "hidden", False)]  # type: ignore[attr-defined]
    options = {o for p in shown if p.param_type_name == "option" for o in p.opts} - {"-h", "--help"}
    return sorted(options), [p.metavar for p in shown if p.param_type_name == "argument"]


def test_commands_options_and_arguments_are_these() -> None:
    group = get_command(app)
    found = {"": surface_of(group)} | {name: surface_of(command) for name, command in group.commands.items()}  # type: ignore[attr-defined]
    assert found == SURFACE
    assert tuple(SURFACE)[1:] == COMMANDS


def test_exit_codes_are_these_and_each_is_in_the_help() -> None:
    assert {code.name: int(code) for code in ExitCode} == EXITS
    listed = [int(line.split()[0]) for line in EXIT_CODES.splitlines() if line.strip()[:1].isdigit()]
    assert listed == sorted(EXITS.values())


def test_every_failure_has_its_own_exit_code() -> None:
    codes = {
        cls.__name__: int(cls.exit_code) for cls in NftctlError.__subclasses__() if cls.__module__ == "nftctl.errors"
    }
    assert codes == {
        "UsageRefused": 2, "ProfileRefused": 3, "RewardFailed": 4, "CheckpointUnusable": 5, "ResumeRefused": 6,
        "TrainingFailed": 7, "EnvironmentUnfit": 8,
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_shows_examples(tmp_path: Path, command: str) -> None:
    answer = nftctl(command, "--help", cwd=tmp_path)
    assert answer.returncode == 0
    assert answer.stderr == ""
    options, arguments = SURFACE[command]
    assert all(name in answer.stdout for name in (*options, *arguments, "-h, --help"))
    assert f"  nftctl {command}" in answer.stdout.split("Examples:")[1]
    assert "--parent-pid" not in answer.stdout
    assert "--await-nodes" not in answer.stdout


def test_the_short_help_option_and_the_exit_codes(tmp_path: Path) -> None:
    answer = nftctl("-h", cwd=tmp_path)
    assert answer.returncode == 0
    assert "143  stopped by SIGTERM" in answer.stdout
    assert all(f"  {command}  " in answer.stdout for command in COMMANDS)


def test_no_arguments_is_help_on_stderr(tmp_path: Path) -> None:
    answer = nftctl(cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "Usage: nftctl" in answer.stderr


def test_version(tmp_path: Path) -> None:
    assert nftctl("--version", cwd=tmp_path).stdout == "nftctl 0.1.0\n"
    for order in (("--version", "--json"), ("--json", "--version")):
        document = the_object(nftctl(*order, cwd=tmp_path))
        assert document["version"] == "0.1.0"
        assert list(document["versions"]) == ["python", "torch", "ray", "diffusers", "peft"]
        assert document["versions"]["torch"].startswith("2.")


@pytest.mark.parametrize(
    "arguments",
    [
        ("launch", "--", "profile.toml"),
        ("launch", "--dry-run", "--"),
        ("validate", "--", "experiment=x"),
        ("--", "launch"),
        ("launch", "--name", "--"),
        ("profiles", "--", "tiny_t2i_cpu"),
        ("init", "--"),
        ("init", "--from", "--", "mine.toml"),
    ],
)
def test_nothing_is_accepted_after_a_double_dash(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    answer = nftctl(*arguments, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "nothing is accepted after `--`" in answer.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message", "way"),
    [
        (("lanch",), "No such command 'lanch'", "try: nftctl --help"),
        (("launch", "--dry"), "--dry-run", "try: nftctl launch --help"),
        (("launch", "--steps", "many"), "--steps", "try: nftctl launch --help"),
        (("launch", "--steps", "0"), "--steps", "try: nftctl launch --help"),
        (("launch", "a.toml", "b.toml"), "b.toml", "try: nftctl launch --help"),
        (("resume",), "CHECKPOINT", "try: nftctl resume --help"),
        (("resume", ""), "the name of the checkpoint is empty", "help: give a run's name"),
        (("inspect-checkpoint", " "), "the name of the checkpoint is empty", "help: give a run's name"),
        (("inspect-checkpoint", "x", "--diff", ""), "the name of the checkpoint is empty", "help: give a run's name"),
        (("reward-ping", "--revision", "r"), "--revision belongs to --url", "help: a profile pins"),
        (("reward-ping", "x.toml", "--url", "http://h"), "not both", ""),
        (("profiles", "a", "b"), "b", "try: nftctl profiles --help"),
        (("init", "--form", "x"), "--from", "try: nftctl init --help"),
        (("export", "x", "y"), "--to", "try: nftctl export --help"),
        (("export", "", "y", "--to", "lora"), "the name of the checkpoint is empty", "help: give a run's name"),
        (("convert", "nowhere", "y"), "nowhere is not a folder", ""),
        (("bench", "--compare", "peers"), "--compare knows naive alone", "help: --compare naive"),
        (("bench", "--write-base", "nano", "y"), "no shape 'nano' of a base", "help: shapes: cosmos3-nano"),
        (("bench", "x.toml", "--write-base", "cosmos3-tiny", "y"), "--write-base takes no PROFILE", ""),
        (("bench", "--ranks", "0"), "--ranks", "try: nftctl bench --help"),
        (("--json", "validate"), "--json belongs to --version", "nftctl validate --json"),
    ],
)
def test_usage_errors_say_what_to_try(tmp_path: Path, arguments: tuple[str, ...], message: str, way: str) -> None:
    answer = nftctl(*arguments, "--json", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: ")
    assert message in answer.stderr
    assert way in answer.stderr
    document = the_object(answer)
    assert message in document["error"]["message"]
    assert list(tmp_path.iterdir()) == []


ALWAYS = ["schema_version", "command", "ok", "exit_code", "diagnostics"]
KEYS = {
    ("validate",): ["profile", "prompts", "memory"],
    ("validate", "--show-resolved"): ["profile", "prompts", "memory", "resolved"],
    ("validate", "--online"): ["profile", "prompts", "memory", "online"],
    ("validate", "--rules"): ["rules"],
    ("launch", "--dry-run"): ["dry_run", "plan"],
    ("launch", "--set", "nonsense"): ["error"],
    ("reward-ping",): ["services"],
    ("inspect-checkpoint", "nowhere"): ["error"],
    ("profiles",): ["profiles"],
    ("profiles", "tiny_t2i_cpu"): ["profile"],
    ("profiles", "--schema"): ["schema"],
    ("init", "no/where.toml"): ["error"],
    ("export", "nowhere", "out", "--to", "lora"): ["error"],
    ("sample", "nowhere"): ["error"],
    ("convert", "nowhere", "out"): ["error"],
    ("bench", "--set", "nonsense"): ["error"],
    ("report", "nowhere"): ["error"],
    ("watch", "nowhere", "--once"): ["error"],
    ("submit", "--to", "slurm"): ["dry_run", "submission"],
    ("submit", "--to", "nowhere"): ["error"],
}
"""Command line -> keys of its JSON object besides those of every object; none of these writes anything."""

NESTED = {
    ("validate", "profile"): ["name", "path"],
    ("validate", "prompts"): ["path", "count", "sha256"],
    ("validate", "memory"): ["ranks", "always_bytes", "peak_bytes", "parts", "not_counted"],
    ("validate --online", "online"): ["rewards", "ray", "gpus"],
    ("profiles tiny_t2i_cpu", "profile"): ["name", "description", "path", "text"],
    ("profiles", "profiles"): ["name", "description"],
    ("validate --rules", "rules"): ["code", "severity", "online", "reason"],
    ("launch --set nonsense", "error"): ["message", "hint"],
    ("launch --dry-run", "plan"): [
        "profile", "run", "resume_from", "steps", "ranks", "device", "rows_per_step", "samples_per_step", "base",
        "prompts", "reward", "checkpoint_every", "identity",
    ],
}  # fmt: skip
"""Command line and key -> keys of the object there, or of each object of the list there."""


@pytest.mark.parametrize(("arguments", "own"), KEYS.items(), ids=[" ".join(a) for a in KEYS])
def test_json_keys_are_these(tmp_path: Path, arguments: tuple[str, ...], own: list[str]) -> None:
    # Colour is asked for, to see that none of it reaches the object.
    answer = nftctl(*arguments, "--json", cwd=tmp_path, env={"FORCE_COLOR": "1"})
    document = the_object(answer)
    assert list(document) == ALWAYS + own
    assert document["schema_version"] == 1
    assert document["command"] == arguments[0]
    assert list(tmp_path.iterdir()) == []


def test_findings_have_these_keys(tmp_path: Path) -> None:
    document = the_object(nftctl("validate", "--set", "rl.bata=1", "--json", cwd=tmp_path))
    (finding,) = document["diagnostics"]
    assert list(finding) == ["code", "key", "message", "help", "severity", "origin", "line", "column"]
    assert (finding["code"], finding["key"], finding["severity"]) == ("unknown-key", "rl.bata", "error")


@pytest.mark.parametrize(("place", "expected"), NESTED.items(), ids=[" ".join(place) for place in NESTED])
def test_nested_json_keys_are_these(tmp_path: Path, place: tuple[str, str], expected: list[str]) -> None:
    found = the_object(nftctl(*place[0].split(), "--json", cwd=tmp_path))[place[1]]
    for entry in found if isinstance(found, list) else [found]:
        assert list(entry) == expected


def test_init_writes_one_file_and_has_these_keys(tmp_path: Path) -> None:
    document = the_object(nftctl("init", "--json", cwd=tmp_path))
    assert list(document) == [*ALWAYS, "path", "extends", "fill_in"]
    assert [path.name for path in tmp_path.iterdir()] == ["profile.toml"]


def test_the_installed_command_is_the_module(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("nftctl")
    answer = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout == nftctl("--version", cwd=tmp_path).stdout == f"nftctl {__version__}\n"
