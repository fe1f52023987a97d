"""`nftctl report`: one run, or several in the same frames, as one HTML file; its path on stdout. Loads no torch.

Also writes the report that every launch and resume leaves behind, where nothing that goes wrong may end the run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from nftctl.cli.completion import runs_folder
from nftctl.cli.console import Console


def report(console: Console, target: str, others: Sequence[str], output: Path | None) -> None:
    """Write the report of `target`, with the runs `others` drawn beside it."""
    from nftctl.report.write import write_report
    from nftctl.run.find import find_run

    run, *compared = (find_run(name, runs_folder()) for name in (target, *others))
    written = write_report(run, compared, output)
    for subject in written.subjects:
        label = f"{subject.name}: " if compared else ""
        console.say(f"{label}{subject.verdict.headline}")
    for sentence in written.album.left_out:
        console.say(f"left out: {sentence}")
    console.data(str(written.path))
    console.result("report", **written.document())


def left_behind(console: Console, run: Path) -> str | None:
    """The report of a run that has just ended; None, with a warning, where none could be written."""
    try:
        from nftctl.report.write import write_report
        from nftctl.run.directory import RunDirectory

        return str(write_report(RunDirectory(run)).path)
    except Exception as error:  # the run is done and saved, whatever this is
        console.warn(f"no report was written: {error}; nftctl report {shlex.quote(str(run))} tries again")
        return None
