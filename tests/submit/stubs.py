"""Programs that stand for Slurm, Ray and nftctl on PATH, for a script that is to be run: each notes that it was called.

`calls` has a line for each; `profile-N.toml` is what the Nth launch read. Files in the folder tell them what to do:
`hold` keeps a launch going until SIGTERM, `code` is the exit code of a launch, `after-term` the one after SIGTERM,
`silent-ray` keeps the head from coming up, `gone` lets the step that removes Ray's folder fail as a lost node does,
`no-requeue` makes Slurm refuse.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.conftest import clean_environment

PROGRAMS = {
    "srun": """
        printf 'srun %s\\n' "$*" >> "$STUBS/calls"
        case $* in *" rm -rf "*) if [ -e "$STUBS/gone" ]; then exit 1; fi ;; esac
        while case ${1-} in -*) true ;; *) false ;; esac; do shift; done
        exec "$@"
    """,
    "scontrol": """
        printf 'scontrol %s\\n' "$*" >> "$STUBS/calls"
        if [ "$1 $2" = "show hostnames" ]; then printf '%s\\n' "$3" | tr , '\\n'; fi
        if [ "$1 $2" = "show job" ] && [ -e "$STUBS/job" ]; then cat "$STUBS/job"; fi
        if [ "$1" = requeue ] && [ -e "$STUBS/no-requeue" ]; then exit 1; fi
    """,
    "ray": """
        printf 'ray %s %s %s\\n' "$2" "${RAY_AUTH_MODE-none}" "${RAY_ADDRESS-none}" >> "$STUBS/calls"
        case $2 in --head)
            if [ -e "$STUBS/silent-ray" ]; then exit 1; fi
            printf '%s' "$RAY_AUTH_TOKEN" > "$STUBS/token"
            mkdir -p "$RAY_TMPDIR/ray"
            echo 10.0.0.1:6379 > "$RAY_TMPDIR/ray/ray_current_cluster"
            echo "$RAY_TMPDIR" > "$STUBS/ray-folder" ;;
        esac
        exec /bin/sleep 60
    """,
    "nftctl": """
        printf 'nftctl %s\\n' "$*" >> "$STUBS/calls"
        if [ "$1" = submit ]; then exit 0; fi
        env > "$STUBS/environment"
        pwd > "$STUBS/folder"
        cat > "$STUBS/profile-$(ls "$STUBS" | grep -c '^profile-').toml"
        if [ -e "$STUBS/hold" ]; then
            heard=
            trap 'echo heard >> "$STUBS/calls"; heard=yes' TERM
            touch "$STUBS/running"
            while [ -z "$heard" ]; do /bin/sleep 0.02; done
            # The step that it is in, and its checkpoint.
            /bin/sleep 0.3
            echo saved >> "$STUBS/calls"
            exit "$(cat "$STUBS/after-term")"
        fi
        exit "$(cat "$STUBS/code")"
    """,
    # Nothing here takes as long as it might elsewhere.
    "sleep": 'exec /bin/sleep 0.02',
}  # fmt: skip


class Stubs:
    """A folder of stub programs, and a way to run a script among them. Example: `Stubs(tmp_path).run(text)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name, body in PROGRAMS.items():
            path = folder / "bin" / name
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)
        self.say(code="0")
        self.say(**{"after-term": "143"})

    def say(self, **files: str) -> None:
        """Write the files that tell the programs what to do."""
        for name, text in files.items():
            (self.folder / name).write_text(text)

    @property
    def calls(self) -> list[str]:
        """What was called, in order."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def environment(self, nodes: str = "n1", extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """That of an sbatch job on `nodes`."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": nodes}
        return {**clean_environment(), "PATH": path, "STUBS": str(self.folder), **slurm, **(extra or {})}

    def start(self, script: str, nodes: str = "n1", extra: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Begin a script, whose folder is not the one it was made in."""
        path = self.folder / "script"
        path.write_text(script, newline="")
        return subprocess.Popen(
            ["bash", str(path)],
            env=self.environment(nodes, extra),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, script: str, nodes: str = "n1", extra: Mapping[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, str]:
        """Exit code and what it said on stderr."""
        process = self.start(script, nodes, extra)
        _, said = process.communicate(timeout=timeout)
        return process.returncode, said

    def interrupt(
        self, script: str, *signals: signal.Signals, nodes: str = "n1", extra: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """The same for a script that is sent signals while its launch is running, one after the other."""
        self.say(hold="")
        process = self.start(script, nodes, extra)
        wait_for(lambda: (self.folder / "running").exists())
        for number in signals:
            process.send_signal(number)
            wait_for(lambda: "heard" in self.calls)
        _, said = process.communicate(timeout=60)
        return process.returncode, said


def shellcheck(*files: Path, shell: str, besides: str = "") -> tuple[int, str]:
    """Exit code and findings of shellcheck, those with the codes `besides` left out."""
    program = str(Path(sys.executable).with_name("shellcheck"))
    command = [program, "--shell", shell, *(["--exclude", besides] if besides else []), *map(str, files)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.returncode, answer.stdout


def wait_for(true: Callable[[], bool]) -> None:
    """Until it is true, a minute at most."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
