"""Bases named by a hub id, `org/name@revision`: found in the local cache of downloads, pinned to a commit, fetched.

Looking never opens a connection; only `fetch` does, and it takes safetensors, JSON and tokenizer files, never a pickle.
The hub's own library is imported only where there is a hub id. Torch-free.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from nftctl.errors import EnvironmentUnfit

PATTERNS = ("*/*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")
"""Files that a base is made of. Weights lie in the folders of its parts; beside them are other programs' copies."""

_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository, and a branch, tag or commit of it. Example: `HubId("nvidia/Cosmos3-Nano", "main")`."""

    repository: str
    revision: str

    @classmethod
    def parse(cls, value: str) -> HubId | None:
        """The parts of `org/name@revision`; None for anything else."""
        found = _HUB_ID.fullmatch(value)
        return cls(found["repository"], found["revision"]) if found else None

    def cached(self) -> Path | None:
        """The snapshot's folder in the local cache; None where it was never downloaded."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(self.repository, revision=self.revision, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            return None

    def fetch(self) -> Path:
        """Download what is missing and return the snapshot's folder. Raises EnvironmentUnfit when that fails."""
        from huggingface_hub import snapshot_download

        try:
            found = snapshot_download(self.repository, revision=self.revision, allow_patterns=list(PATTERNS))
        except Exception as error:  # the library passes on whatever its connection raises
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise EnvironmentUnfit(
                f"{self.repository} at {self.revision} cannot be downloaded: {reason}", hint=f"try: {self.command()}"
            ) from error
        return Path(found)

    def command(self) -> str:
        """The command that downloads the same."""
        included = " ".join(f"--include {shlex.quote(pattern)}" for pattern in PATTERNS)
        return f"hf download {self.repository} --revision {self.revision} {included}"

    def pinned(self) -> str:
        """The same id with the commit that the local cache has for the revision; as it is where there is none."""
        folder = self.cached()
        commit = folder.name if folder is not None else ""
        return f"{self.repository}@{commit}" if _COMMIT.fullmatch(commit) else f"{self.repository}@{self.revision}"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids every download."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
