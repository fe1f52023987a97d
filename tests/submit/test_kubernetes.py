"""The manifest: what a reader of YAML finds in it, held to the fields and types of ray.io/v1 that it uses."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nftctl.errors import UsageRefused
from nftctl.submit.kubernetes import Wishes, is_on, manifest, object_name, parse_volume, quoted
from nftctl.submit.size import Size

from .stubs import Stubs, shellcheck

WISHES = Wishes("registry/nftctl:1", "runs", "/data")
PROFILE = '# The profile\n\n[job]\nname = "a: \\"b\\" #c"\n'
SIZE = Size(nodes=3, ranks=24, ranks_per_node=8, gpus=8, cpus=32)
OPTIONS = ["--auto-resume", "--max-restarts", "2"]


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
NAME = TEXT | {"pattern": r"\A[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?\Z"}
QUANTITY = {"type": "string", "pattern": r"\A[1-9][0-9]*([KMGT]i?)?\Z"}
AMOUNTS = {"type": "object", "additionalProperties": QUANTITY, "minProperties": 1}
PARAMS = {"type": "object", "additionalProperties": TEXT}
METADATA = closed({"name": NAME, "namespace": NAME}, "name")
SECRET = closed({"secretKeyRef": closed({"name": TEXT, "key": TEXT}, "key")}, "secretKeyRef")
ENV = closed({"name": TEXT, "valueFrom": SECRET}, "name", "valueFrom")
MOUNT = closed({"name": TEXT, "mountPath": TEXT | {"pattern": "^/[^:]+$"}}, "name", "mountPath")
CLAIM = closed({"claimName": TEXT}, "claimName")
VOLUME = closed({"name": TEXT, "persistentVolumeClaim": CLAIM, "configMap": closed({"name": NAME}, "name")}, "name")
CONTAINER = closed(
    {
        "name": NAME, "image": TEXT, "env": {"type": "array", "items": ENV},
        "resources": closed({"requests": AMOUNTS, "limits": AMOUNTS}, "requests"),
        "volumeMounts": {"type": "array", "items": MOUNT},
    },
    "name", "image", "volumeMounts",
)  # fmt: skip
POD = closed(
    {"containers": {"type": "array", "items": CONTAINER, "minItems": 1}, "volumes": {"type": "array", "items": VOLUME}},
    "containers", "volumes",
)  # fmt: skip
TEMPLATE = closed({"spec": POD}, "spec")
WORKERS = closed(
    {
        "groupName": NAME, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT, "rayStartParams": PARAMS,
        "template": TEMPLATE,
    },
    "groupName", "minReplicas", "maxReplicas", "rayStartParams", "template",
)  # fmt: skip
CLUSTER = closed(
    {
        "rayVersion": TEXT, "authOptions": closed({"mode": {"enum": ["token", "disabled"]}}),
        "headGroupSpec": closed({"rayStartParams": PARAMS, "template": TEMPLATE}, "rayStartParams", "template"),
        "workerGroupSpecs": {"type": "array", "items": WORKERS},
    },
    "headGroupSpec",
)  # fmt: skip
SPEC = closed(
    {
        "entrypoint": TEXT, "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        "backoffLimit": COUNT, "shutdownAfterJobFinishes": {"type": "boolean"}, "ttlSecondsAfterFinished": COUNT,
        "runtimeEnvYAML": TEXT, "rayClusterSpec": CLUSTER,
    },
)  # fmt: skip
RAYJOB = closed(
    {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": "RayJob"}, "metadata": METADATA, "spec": SPEC},
    "apiVersion", "kind", "metadata", "spec",
)  # fmt: skip
CONFIG = closed(
    {
        "apiVersion": {"const": "v1"}, "kind": {"const": "ConfigMap"}, "metadata": METADATA,
        "data": closed({"profile.toml": TEXT, "launch.sh": TEXT}, "profile.toml", "launch.sh"),
    },
    "apiVersion", "kind", "metadata", "data",
)  # fmt: skip


def read(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap and RayJob, each by its schema."""
    config, job = yaml.safe_load_all(text)
    Draft202012Validator(CONFIG).validate(config)
    Draft202012Validator(RAYJOB).validate(job)
    return config, job


def make(
    run: str = "first", profile: str = PROFILE, size: Size = SIZE, tokens: tuple[str, ...] = (), **more: Any
) -> str:
    return manifest(profile, run, size, tokens, OPTIONS, replace(WISHES, **more))


def test_the_manifest_says_what_was_asked_for() -> None:
    config, job = read(make(tokens=("T", "U"), secret="scorer", namespace="team", memory="512Gi", grace_s=300))
    assert config["data"]["profile.toml"] == PROFILE
    assert config["metadata"] == job["metadata"] == {"name": "first", "namespace": "team"}
    spec = job["spec"]
    # Plain words: what is in quotes here would be read by two shells.
    assert spec["entrypoint"] == "sh /etc/nftctl/launch.sh"
    assert (
        "\nexec nftctl launch /etc/nftctl/profile.toml --auto-resume --max-restarts 2\n" in config["data"]["launch.sh"]
    )
    assert (spec["submissionMode"], spec["backoffLimit"]) == ("K8sJobMode", 3)
    assert (spec["shutdownAfterJobFinishes"], spec["ttlSecondsAfterFinished"]) == (True, 600)
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}}
    cluster = spec["rayClusterSpec"]
    assert (cluster["rayVersion"], cluster["authOptions"]) == (version("ray"), {"mode": "token"})
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}  # ranks sit on the workers alone
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    assert workers["rayStartParams"] == {"num-cpus": "32", "num-gpus": "8"}
    (container,) = workers["template"]["spec"]["containers"]
    limits = {"memory": "512Gi", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": {"cpu": "32", **limits}, "limits": limits}
    for pod in (head["template"]["spec"], workers["template"]["spec"]):
        (container,) = pod["containers"]
        assert container["image"] == "registry/nftctl:1"
        assert {"name": "run", "mountPath": "/data"} in container["volumeMounts"]
        assert {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
        assert container["env"] == [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": "scorer", "key": name}}} for name in ("T", "U")
        ]
    (container,) = head["template"]["spec"]["containers"]
    assert {"name": "profile", "mountPath": "/etc/nftctl"} in container["volumeMounts"]


EVERYTHING: dict[str, Any] = {"tokens": ("T", "U"), "secret": "scorer", "namespace": "team", "memory": "512Gi"}


@pytest.mark.parametrize("kubernetes", ["1.25", kubernetes_validate.latest_version()])
@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {"size": Size(1, 4, 4, 0, 4), "tensors": 2**30}], ids=["least", "all", "estimated"]
)
def test_the_parts_that_kubernetes_itself_reads_are_as_it_publishes_them(
    kubernetes: str, options: dict[str, Any]
) -> None:
    """Fields and types of its own API, by its published schemas; a field that there is not is refused."""
    config, job = yaml.safe_load_all(make(**options))
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "p"}}
    for resource in (config, *(named | {"template": group["template"]} for group in (head, workers))):
        kubernetes_validate.validate(resource, kubernetes, strict=True)


def test_what_a_pod_says_does_not_reach_the_run(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path / "stubs")
    config, _ = read(make(tokens=("NFTCTL_REWARD_TOKEN", "T"), secret="scorer"))
    more = {"NFTCTL_RL__BETA": "3", "NFTCTL_REWARD_TOKEN": "s", "NFTCTL_DEBUG": "1", "NFTCTL_PROFILE": "p", "T": "t"}
    (tmp_path / "launch.sh").write_text(config["data"]["launch.sh"])
    assert shellcheck(tmp_path / "launch.sh", shell="sh") == (0, "")
    command = ["/bin/sh", str(tmp_path / "launch.sh")]
    subprocess.run(command, env=stubs.environment() | more, check=True, stdin=subprocess.DEVNULL, timeout=60)
    assert stubs.calls == ["nftctl launch /etc/nftctl/profile.toml --auto-resume --max-restarts 2"]
    seen = (stubs.folder / "environment").read_text().splitlines()
    kept = sorted(line for line in seen if line.startswith(("NFTCTL_", "T=")))
    assert kept == ["NFTCTL_DEBUG=1", "NFTCTL_REWARD_TOKEN=s", "T=t"]


def test_what_a_device_left_open_means_is_said() -> None:
    assert "so it is" not in make()
    assert "\n#\n# so it is\n#\n#   start it" in make(size=replace(SIZE, why="so it is"))


def test_on_cpus_and_without_a_secret_less_is_asked_for() -> None:
    text = make(size=Size(1, 4, 4, 0, 4), tokens=("T",))
    _, job = read(text)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "4"}}
    assert "# No memory is asked for: what a rank takes here is not known. --memory-per-node asks for it.\n" in text
    assert "env" not in container
    assert "namespace" not in job["metadata"]


def test_memory_that_nobody_named_is_asked_for_by_estimate_and_limits_nothing() -> None:
    on_cpus = Size(1, 4, 4, 0, 4)
    text = make(size=on_cpus, tensors=3 * 2**29)
    _, job = read(text)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    # 4 x (1.5 + 1) + 1
    assert container["resources"] == {"requests": {"cpu": "4", "memory": "11Gi"}}
    assert "# Memory by estimate, and no limit: 4 x (1.5 GiB of tensors,\n" in text
    named = make(size=on_cpus, tensors=3 * 2**29, memory="64Gi")
    assert "estimate" not in named
    assert named == make(size=on_cpus, memory="64Gi")


def test_it_is_commented_and_its_commands_name_it() -> None:
    text = make(run="My_Run", secret="scorer", tokens=("T",), namespace="team")
    comments = [line for line in text.splitlines() if line.strip().startswith("#")]
    assert len(comments) >= 15
    assert f"#   how it stands     kubectl -n team get rayjob {object_name('My_Run')}" in comments
    assert "#   the secret        kubectl -n team create secret generic scorer --from-file=T=TOKEN_FILE" in comments


@pytest.mark.parametrize(
    "text", ["\\", "\\n", '"', "a\nb", "\x00\x85\u2028\ufeff", "é😀", "0", "yes", "~", "# a", "a: b", " a ", "- a", ""]
)
def test_a_quoted_scalar_is_read_as_it_was(text: str) -> None:
    assert yaml.safe_load(f"key: {quoted(text)}") == {"key": text}


@settings(max_examples=30, deadline=None)
@given(
    run=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
    lines=st.lists(st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" ")), max_size=5),
    token=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10),
)
def test_no_value_leaves_its_place(run: str, lines: list[str], token: str) -> None:
    profile = "# head\n" + "".join(f"{line}\n" for line in lines) + "# end\n"
    config, job = read(make(run=run, profile=profile, tokens=(token,), secret="s"))
    assert config["data"]["profile.toml"] == profile
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["env"][0]["name"] == token
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", job["metadata"]["name"])


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("first", "first"), ("nft-public-4gpu", "nft-public-4gpu"), ("nft_public_4gpu", None), ("A.b", None),
        ("x" * 40, "x" * 40), ("x" * 41, None), ("a--b", None), ("übung", None), ("--", None), ("a/b c", None),
        ("a+b", None),
    ],
)  # fmt: skip
def test_names_as_kubernetes_spells_them(run: str, name: str | None) -> None:
    found = object_name(run)
    if name is None:
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*-[0-9a-f]{8}", found)  # ends in the hash of what was lost
        assert len(found) <= 40
        assert object_name(run + "x") != found
    else:
        assert found == name


def test_runs_with_names_of_their_own_are_objects_of_their_own() -> None:
    # Each is a folder of its own on the volume, and applying one must not change the other.
    names = ["my-run", "My-Run", "my.run", "my_run", "my--run", "my-run-", "MY-RUN"]
    assert len({object_name(name) for name in names}) == len(names)
    assert object_name("My-Run").startswith("my-run-")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("image", ""), ("image", "a b"), ("image", "a\n"), ("secret", "Upper"), ("secret", "a_b"), ("secret", "-a"),
        ("namespace", "a.b"), ("namespace", "a" * 64), ("secret", "a\n"),
    ],
)  # fmt: skip
def test_names_that_no_cluster_takes_are_refused(option: str, value: str) -> None:
    with pytest.raises(UsageRefused, match=f"--{option}"):
        make(**{option: value})  # type: ignore[arg-type]


def test_a_volume_is_a_claim_and_a_place() -> None:
    assert parse_volume("runs:/data/") == ("runs", "/data")
    for wrong in ("", "runs", "runs:", "runs:data", "runs:/", "runs:/a/../b", ":/data", "Runs:/data", "runs:/a:ro"):
        with pytest.raises(UsageRefused, match="is not CLAIM:/PATH"):
            parse_volume(wrong)


def test_a_volume_does_not_hide_the_profile() -> None:
    for wrong in ("/etc/nftctl", "/etc/nftctl/", "//etc/nftctl", "/etc", "/etc/nftctl/runs", "/etc/./nftctl"):
        with pytest.raises(UsageRefused, match="is in the way of /etc/nftctl, where the pod has the profile"):
            parse_volume(f"runs:{wrong}")
    assert parse_volume("runs:/etc/nftctl-runs") == ("runs", "/etc/nftctl-runs")
    assert parse_volume("runs://data") == ("runs", "/data")


def test_what_lies_on_a_volume() -> None:
    assert is_on("/data/runs", "/data")
    for elsewhere in ("/data", "/database/runs", "data/runs", "/data/../runs", "runs"):
        assert not is_on(elsewhere, "/data")
