"""Pictures on the page: the first grid beside the one that the slider is at, and the extremes of the last look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nftctl.report.markup import Markup, folded, table, tag
from nftctl.report.samples import Album, Picture


def section(album: Album) -> Markup:
    """Everything about the pictures; without the page's script all grids stand below each other."""
    parts: list[Markup] = []
    if album.grids:
        parts += [_slider(album.grids), _grids(album.grids), tag("div", id="strips", class_="strips")]
    else:
        parts.append(tag("p", "No grid of samples was drawn. samples.prompts and samples.every ask for some."))
    if album.extremes:
        parts.append(_extremes(album.extremes))
    if album.left_out:
        parts.append(tag("p", f"Left out: {'; '.join(album.left_out)}.", class_="note"))
    return Markup.join_all(parts)


def document(album: Album) -> list[dict[str, Any]]:
    """What the page's script needs of each grid."""
    return [{"step": picture.step, **_cells(picture)} for picture in album.grids]


def _cells(picture: Picture) -> dict[str, Any]:
    own = picture.sidecar
    if own is None:
        return {}
    return {
        "prompts": own.prompts,
        "columns": own.columns,
        "rewards": own.rewards,
        "cell": own.cell,
        "origin": own.origin,
        "pitch": own.pitch,
    }


def _slider(grids: Sequence[Picture]) -> Markup:
    last = len(grids) - 1
    label = tag("label", "Samples after step ", tag("output", grids[-1].step, id="grid-step"), for_="grid")
    slider = tag(
        "input", type="range", id="grid", min=0, max=last, value=last, step=1,
        aria_valuetext=f"step {grids[-1].step}", disabled=not last,
    )  # fmt: skip
    return tag("div", label, slider, class_="slider needs-script")


def _grids(grids: Sequence[Picture]) -> Markup:
    figures = []
    for i, picture in enumerate(grids):
        place = "first" if i == 0 else "last" if i == len(grids) - 1 else ""
        image = _image(picture, _alt(picture))
        caption = tag("figcaption", _caption(picture))
        figures.append(tag("figure", caption, image, _rewards(picture), class_=f"grid {place}".strip(), data_index=i))
    return tag("div", *figures, class_="grids", id="grids")


def _caption(picture: Picture) -> str:
    return "Before training" if picture.step == 0 else f"After step {picture.step}"


def _extremes(picture: Picture) -> Markup:
    found = picture.extremes
    named = [
        f"{kind.capitalize()}: {'; '.join(f'{one.prompt} {one.reward:.3f}' for one in found if one.kind == kind)}."
        for kind in dict.fromkeys(one.kind for one in found)
    ]
    image = _image(picture, " ".join([f"The best and the worst samples of step {picture.step}.", *named]))
    rows = [(one.kind, one.prompt, f"{one.reward:.3f}") for one in found]
    title = f"Best and worst of step {picture.step}"
    listed = folded("Prompts and rewards", table(("", "prompt", "reward"), rows, caption=title)) if rows else ""
    return tag("figure", tag("figcaption", tag("h3", title)), image, listed, class_="extremes")


def _image(picture: Picture, alt: str) -> Markup:
    # Never larger than it is, since its text is pixels too.
    width, height = picture.width, picture.height
    return tag("img", src=picture.uri(), alt=alt, width=width, height=height, style=f"max-width:min(100%,{width}px)")


def _alt(picture: Picture) -> str:
    own = picture.sidecar
    if own is None:
        return f"Grid of samples at step {picture.step}, a row for each prompt"
    prompts, columns = "; ".join(own.prompts), ", ".join(own.columns)
    return f"Samples at step {picture.step}. Rows: {prompts}. Columns: {columns}."


def _rewards(picture: Picture) -> Markup | str:
    own = picture.sidecar
    if own is None:
        return ""
    rows = [
        (prompt, *("" if value is None else f"{value:.3f}" for value in values))
        for prompt, values in zip(own.prompts, own.rewards, strict=True)
    ]
    head = ("prompt", *own.columns)
    return folded("Prompts and rewards", table(head, rows, caption=f"Rewards at step {picture.step}", numbers=True))
