"""`nftctl bench`: time a profile's steps on this hardware and print where they go, as a table, JSON and a chart.

Writes into the folder that `--output` names, else the chart alone into a new temporary folder, which is said. Refuses
what `launch` refuses, before Ray is started. Also writes the bases with random weights that rehearsals use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nftctl.cli.console import Console, table, wants_colour
from nftctl.cli.progress import PlainReporter
from nftctl.cli.signals import StopSignals
from nftctl.cli.validate import load_checked
from nftctl.errors import Finding, TrainingFailed, UsageRefused

HEAD = ("part", "ms", "share", "floor ms", "x floor")
CHART, DOCUMENT = "bench.png", "bench.json"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says; `ranks` None is the profile's own number."""

    steps: int
    warm: int
    ranks: int | None
    compare: str | None
    output: Path | None


def bench(console: Console, argument: str | None, sets: Sequence[str], wishes: Wishes) -> None:
    """Measure a profile and print the figures."""
    from nftctl.run.outfolder import refuse_taken

    if wishes.compare not in (None, "naive"):
        raise UsageRefused(f"--compare knows naive alone, got {wishes.compare}", hint="--compare naive")
    if wishes.output is not None:
        refuse_taken(wishes.output)
    with _scratch() as scratch:
        document, warnings = _measure(console, argument, sets, wishes, scratch)
    chart = _write(document, wishes.output)
    _print(console, document)
    console.say(f"chart: {chart}")
    console.result("bench", warnings, bench=document, chart=str(chart))


def write_base(console: Console, argument: str | None, shape: str, folder: Path) -> None:
    """Write a base of that shape with random weights."""
    if argument is not None:
        raise UsageRefused("--write-base takes no PROFILE", hint="nftctl bench --write-base SHAPE FOLDER")
    from nftctl.model.shapes import REHEARSAL_SHAPES

    if shape not in REHEARSAL_SHAPES:
        raise UsageRefused(f"no shape {shape!r} of a base", hint=f"shapes: {', '.join(REHEARSAL_SHAPES)}")
    console.say(f"writing a {shape} with random weights to {folder}")
    from nftctl.model import rehearsal

    rehearsal.write_base(shape, folder)
    console.data(str(folder))
    console.result("bench", base={"shape": shape, "path": str(folder)})


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for the ranks' logs; it stays where the error names one of them."""
    folder = Path(tempfile.mkdtemp(prefix="nftctl-bench-"))
    keep = False
    try:
        yield folder
    except TrainingFailed:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _measure(
    console: Console, argument: str | None, sets: Sequence[str], wishes: Wishes, scratch: Path
) -> tuple[dict[str, Any], list[Finding]]:
    # A rank of its own is no profile's right, so the profile is judged as one of two.
    asked = None if wishes.ranks is None else max(2, wishes.ranks)
    flags: dict[str, object] = {
        "rl.max_steps": wishes.warm + wishes.steps,
        "rl.group_size": asked,
        "grid.ranks": asked,
        "job.run_dir": str(scratch),
        "job.name": "bench",
    }
    resolved, warnings = load_checked(console, argument, sets, flags, fetch=True)
    from nftctl.engine.plan import plan_launch

    plan = plan_launch(resolved, argv=sys.argv, note=console.say)
    with StopSignals():
        from nftctl.engine import bench as engine

        plan = engine.derive(plan, wishes.ranks or plan.profile.ranks)
        if plan.profile.ranks == 1:
            console.say(engine.ONE_RANK)
        amount = engine.Wishes(wishes.steps, wishes.warm, wishes.compare == "naive")
        return engine.run_bench(plan, amount, scratch, PlainReporter(console)), warnings


def _write(document: Mapping[str, Any], output: Path | None) -> Path:
    """The chart, and with `--output` the document beside it; where the chart is."""
    from nftctl.engine.chart import Bar, write_bars
    from nftctl.run.canonical import pretty_bytes
    from nftctl.run.outfolder import new_folder

    bars = [Bar(p["title"], p["seconds"], p["floor_seconds"]) for p in document["parts"]]
    lines = [_headline(document), _step_line(document)]
    if output is None:
        chart = Path(tempfile.mkdtemp(prefix="nftctl-bench-")) / CHART
        write_bars(chart, bars, lines)
        return chart
    with new_folder(output) as draft:
        write_bars(draft / CHART, bars, lines)
        (draft / DOCUMENT).write_bytes(pretty_bytes(dict(document)))
    return output / CHART


def _print(console: Console, document: Mapping[str, Any]) -> None:
    console.data(_headline(document))
    rows = [_part_row(part) for part in document["parts"]]
    step = document["step"]
    rows.append(("step", _ms(step["parts_seconds"]), "100.0 %", _ms(step["floor_seconds"]), f"{step['ratio']:.2f}"))
    if not console.json:
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            _draw(rows)
        else:
            for line in table([HEAD, *rows]):
                print(line)
    for line in table(summary(document)):
        console.data(line)


def _part_row(part: Mapping[str, Any]) -> tuple[str, ...]:
    floor = "" if part["floor_seconds"] is None else _ms(part["floor_seconds"])
    ratio = "" if part["ratio"] is None else f"{part['ratio']:.2f}"
    return part["title"], _ms(part["seconds"]), f"{100 * part['share']:.1f} %", floor, ratio


def _draw(rows: Sequence[Sequence[str]]) -> None:
    """The table on a terminal."""
    from rich.console import Console as Terminal
    from rich.table import Table

    colour: dict[str, Any] = {} if wants_colour(sys.stdout, os.environ) else {"no_color": True, "color_system": None}
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(HEAD):
        drawn.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows[:-1]:
        drawn.add_row(*row)
    drawn.add_section()
    drawn.add_row(*rows[-1], style="bold")
    Terminal(file=sys.stdout, **colour).print(drawn)


def _headline(document: Mapping[str, Any]) -> str:
    """What was measured, on what."""
    settings, devices = document["settings"], document["devices"]
    label = f" ({document['label']})" if document["label"] else ""
    lowered = ", rollouts in fp8" if settings["rollout_precision"] == "fp8" else ""
    return (
        f"{document['profile']}{label}: {document['ranks']} x {devices[0]['device']}, "
        f"{settings['height']} x {settings['width']}, {settings['rows_per_step']} rows, "
        f"{settings['sample_steps']} steps, guidance {settings['guidance']:g}, {settings['dtype']}{lowered}"
    )


def _step_line(document: Mapping[str, Any]) -> str:
    step = document["step"]
    return (
        f"{step['seconds']:.3f} s a step (median of {len(step['all_seconds'])}), "
        f"{100 * step['outside_denoiser_share']:.1f} % of it outside the denoiser's forwards and backwards"
    )


def summary(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures below the table, a name and a sentence each."""
    step, rollout, training = document["step"], document["rollout"], document["training"]
    rates = [device["matmul_flops_per_second"] for device in document["devices"]]
    counts, gathers, peaks = document["forwards"], document["gathers"], document["gpu_peak_gb"]
    rows = [
        ("step", _step_line(document)),
        (
            "rollout",
            f"{rollout['ms_per_forward']:.3f} ms a sample-forward, floor {rollout['floor_ms']:.3f}: "
            f"{rollout['ratio']:.2f} x; with solver and noise {rollout['ms_with_solver']:.3f} ms: "
            f"{rollout['ratio_with_solver']:.2f} x" + _sustained(document, rollout["ratio"]),
        ),
        (
            "training",
            f"{training['ms_per_pair']:.3f} ms a pair, floor {training['floor_ms']:.3f}: {training['ratio']:.2f} x",
        ),
        ("samples", f"{step['samples_per_second']:.3f} a second, {step['samples_per_second_per_rank']:.3f} a rank"),
        (
            "arithmetic",
            f"{100 * step['mfu']:.1f} % of {min(rates) / 1e12:.4g} TFLOP/s, as measured "
            f"({document['devices'][0]['matmul_dtype']}, each product after a rest)",
        ),
        ("forwards", f"{counts['planned']} planned, {counts['executed']} executed, a rank and step"),
        (
            "gathers",
            f"{gathers['calls']} all-gathers, {gathers['bytes'] / 1e9:.3f} GB, a rank and step; before them "
            f"{gathers['before_calls']}, {gathers['before_bytes'] / 1e9:.3f} GB",
        ),
    ]
    if peaks:
        rows.append(("GPU memory", ", ".join(f"{name} {peak:.1f} GB" for name, peak in peaks.items()) + " at the most"))
    for beside in document["beside"]:
        rows.append(("beside", f"{beside['name']} {_ms(max(beside['by_rank']))} ms, not in the sum"))
    return rows + _naive_rows(document)


def _sustained(document: Mapping[str, Any], ratio: float) -> str:
    """The rollout's ratio where the floor is at the rate that the device keeps up, if that was measured."""
    shares = [
        device["sustained_flops_per_second"] / device["matmul_flops_per_second"]
        for device in document["devices"]
        if device.get("sustained_flops_per_second")
    ]
    if not shares:
        return ""
    rate = min(device["sustained_flops_per_second"] for device in document["devices"]) / 1e12
    return f"; {ratio * sum(shares) / len(shares):.2f} x at the {rate:.4g} TFLOP/s that products without a pause reach"


def _naive_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    naive = document["naive"]
    if naive is None:
        return []
    errors = naive["relative_error"]
    low = errors["lowered_to_float32"]
    exact = (
        f"against float32 ours {errors['ours_to_float32']:.2g}, "
        + ("" if low is None else f"ours at the rollout's precision {low:.2g}, ")
        + f"stock {errors['stock_to_float32']:.2g}; "
        if not errors["float32_skipped"]
        else f"float32 left out: {errors['float32_skipped']}; "
    )
    return [
        ("naive", naive["what"]),
        (
            "",
            f"{naive['ms_per_forward']:.3f} ms a sample-forward: {naive['forward_ratio']:.2f} x ours; "
            f"{naive['ms_per_pair']:.3f} ms a pair: {naive['pair_ratio']:.2f} x ours",
        ),
        (
            "",
            f"{naive['step_seconds']:.3f} s a step: {naive['step_ratio']:.2f} x ours "
            f"(extrapolated from {naive['extrapolated_from']}; what is not the denoiser's is taken from ours)",
        ),
        ("velocities", f"{exact}ours against stock {errors['ours_to_stock']:.2g} (relative, 2-norm)"),
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
