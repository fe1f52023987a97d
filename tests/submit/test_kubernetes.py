"""The manifest: what a reader of YAML finds in it, held to the fields and types of ray.io/v1 that it uses."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nftctl.errors import UsageRefused
from nftctl.submit.kubernetes import Wishes, is_on, manifest, object_name, parse_volume, quoted
from nftctl.submit.size import Size

WISHES = Wishes("registry/nftctl:1", "runs", "/data")
PROFILE = '# The profile\n\n[job]\nname = "a: \\"b\\" #c"\n'
SIZE = Size(nodes=3, ranks=24, ranks_per_node=8, gpus=8, cpus=32)
COMMAND = "nftctl launch /etc/nftctl/profile.toml --auto-resume"


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
        "data": closed({"profile.toml": TEXT}, "profile.toml"),
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
    return manifest(profile, run, size, tokens, COMMAND, replace(WISHES, **more))


def test_the_manifest_says_what_was_asked_for() -> None:
    config, job = read(make(tokens=("T", "U"), secret="scorer", namespace="team", memory="512Gi", grace_s=300))
    assert config["data"]["profile.toml"] == PROFILE
    assert config["metadata"] == job["metadata"] == {"name": "first", "namespace": "team"}
    spec = job["spec"]
    assert spec["entrypoint"] == COMMAND
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


def test_on_cpus_and_without_a_secret_less_is_asked_for() -> None:
    text = make(size=Size(1, 4, 4, 0, 4), tokens=("T",))
    _, job = read(text)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "4"}}
    assert "env" not in container
    assert "namespace" not in job["metadata"]


def test_it_is_commented_and_its_commands_name_it() -> None:
    text = make(run="My_Run", secret="scorer", tokens=("T",), namespace="team")
    comments = [line for line in text.splitlines() if line.strip().startswith("#")]
    assert len(comments) >= 15
    assert "#   how it stands     kubectl -n team get rayjob my-run" in comments
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
        ("first", "first"), ("nft_public_4gpu", "nft-public-4gpu"), ("A.b", "a-b"),
        ("x" * 40, "x" * 40), ("x" * 41, None), ("übung", None), ("--", None), ("a/b c", None), ("a+b", None),
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


def test_what_lies_on_a_volume() -> None:
    assert is_on("/data/runs", "/data")
    for elsewhere in ("/data", "/database/runs", "data/runs", "/data/../runs", "runs"):
        assert not is_on(elsewhere, "/data")
