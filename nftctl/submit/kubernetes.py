"""A run as a RayJob of KubeRay (ray.io/v1) with its profile in a ConfigMap, as commented YAML.

Owns the manifest's text and the quoting of every value in it. A token stands in it only as the name of a secret. The
command is a file beside the profile, since the entrypoint of a RayJob goes through shells that each read its quotes.
Refuses names that Kubernetes refuses, a run folder that is not on the volume, and a volume where the profile is.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath

from nftctl.errors import UsageRefused
from nftctl.profile.diagnose import printable
from nftctl.submit.portable import without_settings
from nftctl.submit.size import Size
from nftctl.submit.template import fill

PROFILE_FOLDER = "/etc/nftctl"
ENTRYPOINT = f"sh {PROFILE_FOLDER}/launch.sh"
"""What the job runs, in plain words."""
BESIDES = 2**30
"""Bytes that a rank takes besides its tensors, for Python and torch, and Ray on each node; about, and rather more."""
NAME_LIMIT = 40
"""KubeRay appends to a RayJob's name and keeps the whole below 64 characters."""

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the profile does not say. `claim` is a PersistentVolumeClaim, mounted at `mount` in every pod.

    `memory` is what was asked for a node; `tensors`, where known, the bytes that a rank's tensors take at their peak in
    the memory of its host.
    """

    image: str
    claim: str
    mount: str
    secret: str = ""
    namespace: str = ""
    memory: str = ""
    grace_s: int = 120
    restarts: int = 3
    tensors: int | None = None


def parse_volume(text: str) -> tuple[str, str]:
    """Claim and mount path of `CLAIM:/PATH`. Raises UsageRefused."""
    claim, colon, mount = text.partition(":")
    path = PurePosixPath(mount)
    clean = path.is_absolute() and len(path.parts) > 1 and ".." not in path.parts and ":" not in mount
    if not colon or not _SUBDOMAIN.fullmatch(claim) or not clean or not mount.isprintable():
        raise UsageRefused(
            f'--volume "{printable(text)}" is not CLAIM:/PATH',
            hint="the name of a PersistentVolumeClaim and where pods see it: --volume runs:/data",
        )
    path = PurePosixPath("/", *path.parts[1:])  # two slashes in front are one
    profile = PurePosixPath(PROFILE_FOLDER)
    if path == profile or path in profile.parents or profile in path.parents:
        raise UsageRefused(
            f'--volume "{printable(text)}" is in the way of {PROFILE_FOLDER}, where the pod has the profile',
            hint=f"mount it elsewhere: --volume {claim}:/data",
        )
    return claim, str(path)


def refuse_unnameable(wishes: Wishes) -> None:
    """Raises UsageRefused for the first name that no cluster would take."""
    if not wishes.image or not wishes.image.isprintable() or " " in wishes.image:
        raise UsageRefused(f'--image "{printable(wishes.image)}" is not the name of an image')
    for option, name, form in (("--secret", wishes.secret, _SUBDOMAIN), ("--namespace", wishes.namespace, _LABEL)):
        if name and not form.fullmatch(name):
            raise UsageRefused(
                f'{option} "{printable(name)}" is not a name of Kubernetes',
                hint="lower-case letters, digits and hyphens, beginning and ending with a letter or digit",
            )


def object_name(run: str) -> str:
    """The run's name as Kubernetes spells names; one that has to be changed for that ends in its hash.

    Two runs whose names differ in case or dots alone are then two objects, as they are two folders.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if plain == run and len(plain) <= NAME_LIMIT:
        return plain
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    return f"{plain[: NAME_LIMIT - 9].strip('-') or 'run'}-{digest}"


def is_on(path: str, mount: str) -> bool:
    """Whether an absolute path lies below a mount."""
    parts = PurePosixPath(path)
    return ".." not in parts.parts and PurePosixPath(mount) in parts.parents


def manifest(profile: str, run: str, size: Size, tokens: Sequence[str], options: Sequence[str], wishes: Wishes) -> str:
    """The YAML of both objects. `profile` is `portable.profile_text`, `options` are those of `nftctl launch`."""
    refuse_unnameable(wishes)
    kubectl = f"kubectl -n {wishes.namespace}" if wishes.namespace else "kubectl"
    gpus = [f'nvidia.com/gpu: "{size.gpus}"'] if size.gpus else []
    memory = [f"memory: {quoted(wishes.memory)}"] if wishes.memory else []
    limits = [*memory, *gpus]
    about_memory, estimated = ("", []) if wishes.memory else _estimated(size, wishes.tensors)
    launch = shlex.join(["nftctl", "launch", f"{PROFILE_FOLDER}/profile.toml", *options])
    return fill(
        "rayjob.template",
        {
            "title": f"Run {printable(run)} of nftctl on Kubernetes: {size.describe()}",
            "why": f"#\n# {size.why}" if size.why else "",
            "object": object_name(run),
            "object_quoted": quoted(object_name(run)),
            "namespace": f"namespace: {quoted(wishes.namespace)}" if wishes.namespace else "",
            "profile": profile.rstrip("\n"),
            "launch": f"{without_settings(tokens)}\nexec {launch}",
            "entrypoint": quoted(ENTRYPOINT),
            "restarts": str(wishes.restarts),
            "grace": str(wishes.grace_s),
            "ray_version": version("ray"),
            "ray_version_quoted": quoted(version("ray")),
            "image": quoted(wishes.image),
            "env": _environment(tokens, wishes.secret),
            "size": size.describe(),
            "nodes": str(size.nodes),
            "cpus": str(size.cpus),
            "gpus": str(size.gpus),
            "about_memory": about_memory,
            "requests": "\n".join([f'cpu: "{size.cpus}"', *estimated, *limits]),
            "limits": "\n".join(["limits:", *(f"  {line}" for line in limits)]) if limits else "",
            "run_mount": f"- name: run\n  mountPath: {quoted(wishes.mount)}",
            "run_volume": f"- name: run\n  persistentVolumeClaim:\n    claimName: {quoted(wishes.claim)}",
            "profile_folder": PROFILE_FOLDER,
            "kubectl": kubectl,
            "secret_command": _secret_command(kubectl, tokens, wishes.secret),
        },
    )


def _estimated(size: Size, tensors: int | None) -> tuple[str, list[str]]:
    """A comment, and the memory to ask for where nobody said how much.

    A request finds a node with room. It is no limit: an estimate that is too low must not end a run.
    """
    if tensors is None:
        return "# No memory is asked for: what a rank takes here is not known. --memory-per-node asks for it.", []
    total = -(-(size.ranks_per_node * (tensors + BESIDES) + BESIDES) // 2**30)
    comment = (
        f"# Memory by estimate, and no limit: {size.ranks_per_node} x ({tensors / 2**30:.1f} GiB of tensors,\n"
        "# see `nftctl validate --memory`, and 1 GiB for Python and torch), and 1 GiB for Ray.\n"
        "# --memory-per-node sets request and limit."
    )
    return comment, [f'memory: "{total}Gi"']


def quoted(text: str) -> str:
    """A YAML scalar that is this text and nothing else, on one line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def _environment(tokens: Sequence[str], secret: str) -> str:
    if not tokens or not secret:
        return ""
    lines = ["env:"]
    for variable in tokens:
        lines += [f"  - name: {quoted(variable)}", "    valueFrom:", "      secretKeyRef:"]
        lines += [f"        name: {quoted(secret)}", f"        key: {quoted(variable)}"]
    return "\n".join(lines)


def _secret_command(kubectl: str, tokens: Sequence[str], secret: str) -> str:
    """How the secret comes to be, from a file for each token; what stands on a command line is seen by others."""
    if not tokens or not secret:
        return ""
    keys = " ".join(f"--from-file={shlex.quote(printable(variable))}=TOKEN_FILE" for variable in tokens)
    return (
        f"#   the secret        {kubectl} create secret generic {secret} {keys}\n"
        "#                     (a newline at the file's end would be part of the token: printf %s, and not echo)"
    )
