"""That nothing gets out of the place that it was put in."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from nftctl.report.markup import Markup, script_data, tag

NASTY = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onclick='x",
    "<!-- <script>",
    "&lt;b&gt; & &amp;",
    "line\u2028and\u2029paragraph",
    "]]></svg>",
]


class Reader(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", NASTY)
def test_text_and_attributes_come_back_as_they_were(text: str) -> None:
    read = Reader(tag("p", text, title=text))
    assert read.tags == [("p", {"title": text})]
    assert read.text == text


@pytest.mark.parametrize("text", NASTY)
def test_data_of_the_script_is_one_element_and_reads_back(text: str) -> None:
    block = script_data("data", {"prompts": [text], text: 1})
    read = Reader(block)
    assert read.tags == [("script", {"type": "application/json", "id": "data"})]
    assert json.loads(read.text) == {"prompts": [text], text: 1}
    inside = block.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert not set(inside) & set("<>&\u2028\u2029")


def test_what_no_document_can_hold_is_replaced() -> None:
    assert tag("p", "a\x00b\x1b[31m\udcffc\ufffe") == "<p>a\ufffdb\ufffd[31m\ufffdc\ufffd</p>"
    assert json.loads(Reader(script_data("d", {"a\x00": ("\udcff",)})).text) == {"a\ufffd": ["\ufffd"]}
    assert tag("p", "tab\tand\nline") == "<p>tab\tand\nline</p>"


def test_markup_stays_and_attributes_follow_their_values() -> None:
    inner = tag("b", "x")
    assert isinstance(inner, Markup)
    assert tag("td", inner, " & ", class_="num", aria_label=None, hidden=True, disabled=False) == (
        '<td class="num" hidden="hidden"><b>x</b> &amp; </td>'
    )
    assert tag("path", d="M0 0h1", stroke_width=2) == '<path d="M0 0h1" stroke-width="2"/>'
    assert Markup.join_all(["<", inner], ", ") == "&lt;, <b>x</b>"
