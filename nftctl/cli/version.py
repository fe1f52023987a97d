"""`nftctl --version`: our own version, and with `--json` the versions that decide what a run computes.

Reads the metadata of installed packages; imports none of them.
"""

from __future__ import annotations

import platform

from nftctl import __version__
from nftctl.cli.console import Console

ENGINE_PACKAGES = ("torch", "ray", "diffusers", "peft")


def print_version(*, json: bool) -> None:
    """Print `nftctl 0.1.0`, or one object with the versions of Python and the engine (null: not installed)."""
    if not json:
        print(f"nftctl {__version__}")
        return
    versions = {"python": platform.python_version()} | {name: _installed(name) for name in ENGINE_PACKAGES}
    Console(json=True).result("version", version=__version__, versions=versions)


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
