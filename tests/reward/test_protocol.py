"""The wire format, written out by hand from its specification, and everything that must not pass for a score."""

import base64
import json
import math
import pickle

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import flat, items

from nftctl.errors import ExitCode, RewardFailed
from nftctl.reward.protocol import (
    Item,
    RequestRefused,
    RevisionDiffers,
    Score,
    ServiceInfo,
    encode_error,
    encode_info,
    encode_reply,
    encode_request,
    finite,
    parse_error,
    parse_info,
    parse_reply,
    parse_request,
)

IDS = ["7/0", "7/1", "7/2", "7/3"]
INFO = {
    "protocol": "nftctl-reward/1",
    "name": "toy",
    "revision": "r1",
    "modalities": ["image"],
    "components": ["ocr"],
    "max_items": 64,
}


def _reply(scores=(1.0, 0.0, -2.5, 3), **extra):
    entries = [{"id": i, "score": s, "components": {"ocr": s}} for i, s in zip(IDS, scores, strict=False)]
    return {"revision": "r1", "scores": entries} | extra


def _parse(document):
    return parse_reply(json.dumps(document).encode(), IDS, "r1")


def test_a_request_is_the_documented_object():
    item = Item("7/2", "a red 7", {"digit": 7}, flat((255, 0, 0), size=1))
    assert json.loads(encode_request("run/1/5/0/0", "r1", [item], "raw")) == {
        "request_id": "run/1/5/0/0",
        "revision": "r1",
        "items": [
            {
                "id": "7/2",
                "prompt": "a red 7",
                "metadata": {"digit": 7},
                "image": {"encoding": "raw", "width": 1, "height": 1, "data": base64.b64encode(b"\xff\0\0").decode()},
            }
        ],
    }


@pytest.mark.parametrize("encoding", ["png", "raw"])
def test_a_request_comes_back_whole(encoding):
    sent = items()
    got = parse_request(encode_request("k", "r1", sent, encoding), max_items=4)
    assert (got.request_id, got.revision) == ("k", "r1")
    for a, b in zip(sent, got.items, strict=True):
        assert (a.id, a.prompt, a.metadata) == (b.id, b.prompt, b.metadata)
        np.testing.assert_array_equal(a.image, b.image)


def test_equal_requests_are_equal_bytes():
    assert encode_request("k", "r1", items()) == encode_request("k", "r1", items())


@pytest.mark.parametrize("key", ["", "ä", "a b", "a\r\nX: y", "k" * 201])
def test_a_key_must_fit_a_header(key):
    with pytest.raises(RewardFailed, match="printable ASCII"):
        encode_request(key, "r1", items())


@pytest.mark.parametrize("value", [math.nan, [math.inf], {"a": {"b": -math.inf}}, b"x", {1: 2}, "\ud800"])
def test_metadata_that_json_would_change_is_refused_by_item(value):
    bad = Item("7/9", "p", {"value": value}, flat((0, 0, 0)))
    with pytest.raises(RewardFailed, match=r"item '7/9' cannot be sent"):
        encode_request("k", "r1", [*items(), bad])


def test_the_same_item_twice_is_refused_on_both_sides():
    with pytest.raises(RewardFailed, match=r"'7/0' is in the request twice"):
        encode_request("k", "r1", items() + items(1))
    document = json.loads(encode_request("k", "r1", items(2)))
    document["items"][1]["id"] = "7/0"
    with pytest.raises(RequestRefused, match=r"'7/0' is in the request twice"):
        parse_request(json.dumps(document).encode(), max_items=4)


def _damage(path, value):
    document = json.loads(encode_request("k", "r1", items(2)))
    target = document
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["request_id"], "", "request_id"),
        (["request_id"], "ä", "printable ASCII"),
        (["revision"], 1, "revision of the request is 1"),
        (["items"], [], "no items"),
        (["items"], None, "items of the request is null"),
        (["items", 1], 3, "item 1 is 3, not an object"),
        (["items", 1, "id"], True, "id of item 1 is true"),
        (["items", 1, "prompt"], None, r"prompt of item '7/1' is null"),
        (["items", 1, "metadata"], [], r"metadata of item '7/1'"),
        (["items", 1, "fps"], 8, "unknown field 'fps'"),
        (["items", 1, "image", "frames"], 8, "unknown field 'frames'"),
        (["items", 1, "image", "width"], True, r"width of the image of item '7/1' is true"),
        (["items", 1, "image", "width"], 4.0, "not a whole number"),
        (["items", 1, "image", "width"], 5, "declared 5x4"),
        (["items", 1, "image", "data"], "AAAA", r"the image of item '7/1': data is not a readable png"),
        (["items", 1, "metadata"], {"a": math.nan}, "not strict JSON"),
        (["extra"], 1, "unknown field 'extra'"),
    ],
)
def test_a_bad_request_is_refused_with_its_place(path, value, says):
    with pytest.raises(RequestRefused, match=says) as refused:
        parse_request(_damage(path, value), max_items=4)
    assert (refused.value.status, refused.value.code) == (400, "bad-request")


def test_too_many_items_name_the_limit():
    with pytest.raises(RequestRefused, match="4 items in one request; this service takes at most 3") as refused:
        parse_request(encode_request("k", "r1", items(4)), max_items=3)
    assert refused.value.status == 413


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_bytes_break_the_parsers(body):
    blob = body.encode() if isinstance(body, str) else body
    with pytest.raises(RequestRefused):
        parse_request(blob, max_items=4)
    with pytest.raises(RewardFailed):
        parse_reply(blob, IDS, "r1")
    with pytest.raises(RewardFailed):
        parse_info(blob)
    assert isinstance(parse_error(blob), str)


def test_nesting_without_end_is_refused():
    for opening in (b"[", b'{"a":'):
        with pytest.raises(RewardFailed, match="not JSON"):
            parse_reply(opening * 100_000, IDS, "r1")


def test_a_good_reply_is_scores_by_item():
    assert _parse(_reply()) == [Score(i, s, {"ocr": s}) for i, s in zip(IDS, (1.0, 0.0, -2.5, 3.0), strict=True)]


def test_a_reply_may_leave_out_components_and_say_more():
    document = {"revision": "r1", "seconds": 3, "scores": [{"id": i, "score": 0, "note": "x"} for i in IDS]}
    assert _parse(document) == [Score(i, 0.0) for i in IDS]


@given(st.permutations(range(4)))
def test_order_does_not_matter(order):
    document = _reply()
    document["scores"] = [document["scores"][n] for n in order]
    assert [s.score for s in _parse(document)] == [1.0, 0.0, -2.5, 3.0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda c: st.lists(c) | st.dictionaries(st.text(), c),
)


@settings(max_examples=100, deadline=None)
@given(json_values, st.integers(0, 3), st.sampled_from(["score", "component"]))
def test_only_finite_numbers_are_scores(value, n, place):
    document = _reply()
    if place == "score":
        document["scores"][n]["score"] = value
    else:
        document["scores"][n]["components"]["ocr"] = value
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    if number or (isinstance(value, float) and math.isfinite(value)):
        got = _parse(document)[n]
        assert (got.score if place == "score" else got.components["ocr"]) == value
    else:
        with pytest.raises(RewardFailed, match=f"item '{IDS[n]}'"):
            _parse(document)


@pytest.mark.parametrize(
    ("literal", "says"),
    [
        ("NaN", "item '7/1' is nan, not a finite number"),
        ("Infinity", "item '7/1' is inf, not a finite number"),
        ("-Infinity", "item '7/1' is -inf, not a finite number"),
        ("1e999", "item '7/1' is inf, not a finite number"),
        ("9" * 400, "item '7/1' is inf, not a finite number"),
        ("null", "item '7/1' is null, not a number"),
        ("true", "item '7/1' is true, not a number"),
        ('"1.0"', "item '7/1' is '1.0', not a number"),
        ("[1]", r"item '7/1' is \[1\], not a number"),
    ],
)
def test_the_item_with_the_wrong_value_is_named(literal, says):
    body = json.dumps(_reply(scores=(1.0, 12345, 0.0, 2.0))).replace("12345", literal, 1)
    with pytest.raises(RewardFailed, match=says):
        parse_reply(body.encode(), IDS, "r1")


def test_nan_outside_the_scores_is_not_json_either():
    with pytest.raises(RewardFailed, match="not strict JSON"):
        _parse(_reply(seconds=math.nan))


def _entries(change):
    document = _reply()
    document["scores"] = change(document["scores"])
    return document


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (_entries(lambda s: s[:3]), r"3 scores for 4 images: item '7/3' has no score"),
        (
            _entries(lambda s: [*s, {"id": "x", "score": 1}]),
            r"5 scores for 4 images: item 'x' was scored but never sent",
        ),
        (_entries(lambda s: [s[0], s[0], *s[2:]]), r"item '7/0' was scored twice"),
        (_entries(lambda s: [*s, s[3]]), r"item '7/3' was scored twice"),
        (_entries(lambda s: [{"id": "x", "score": 1}, *s[1:]]), r"'x' was scored but never sent"),
        (_entries(lambda s: [{"score": 1}, *s[1:]]), "id of score 0 is null"),
        (_entries(lambda s: [{"id": 7, "score": 1}, *s[1:]]), "id of score 0 is 7"),
        (_entries(lambda s: [{"id": "7/0"}, *s[1:]]), r"no score for item '7/0'"),
        (_entries(lambda s: [s[0] | {"components": None}, *s[1:]]), r"components of item '7/0' is null"),
        (_entries(lambda s: [s[0] | {"error": "oom"}, *s[1:]]), r"score of item '7/0' holds an error: 'oom'"),
        (_entries(lambda s: {"7/0": 1}), "scores of the reply"),
        (_reply(error={"code": "oom", "message": "m"}), "the reply holds an error"),
        (_reply(error=None), "the reply holds an error: null"),
        ({"revision": "r1"}, "scores of the reply is null"),
        ({"scores": []}, "revision of the reply is null"),
    ],
)
def test_a_reply_that_does_not_fit_the_request_is_refused(document, says):
    with pytest.raises(RewardFailed, match=says):
        _parse(document)


def test_another_revision_is_its_own_error_and_survives_a_process_border():
    with pytest.raises(RevisionDiffers, match="'r2', the profile pins 'r1'") as caught:
        _parse(_reply() | {"revision": "r2"})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.message, copy.hint) == (RevisionDiffers, caught.value.message, caught.value.hint)
    assert copy.exit_code == ExitCode.REWARD


def test_replies_are_checked_before_they_are_sent():
    scores = [Score("a", np.float32(0.5), {"ocr": np.int64(2)})]  # what scorers really return
    assert json.loads(encode_reply("r1", scores)) == {
        "revision": "r1",
        "scores": [{"id": "a", "score": 0.5, "components": {"ocr": 2.0}}],
    }
    for bad in (math.nan, math.inf, None, "1", True, np.bool_(True)):
        with pytest.raises(RewardFailed, match="item 'a'"):
            encode_reply("r1", [Score("a", bad)])
        with pytest.raises(RewardFailed, match="component 'ocr' of item 'a'"):
            encode_reply("r1", [Score("a", 1.0, {"ocr": bad})])


def test_info_comes_back_whole():
    info = ServiceInfo("toy", "r1", ("image",), ("ocr",), 64)
    assert json.loads(encode_info(info)) == INFO
    assert parse_info(encode_info(info)) == info


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"protocol": "nftctl-reward/2"}, "speaks 'nftctl-reward/2', not 'nftctl-reward/1'"),
        ({"revision": ""}, "revision of the service's info"),
        ({"revision": None}, "revision of the service's info is null"),
        ({"modalities": ["video"]}, "scores video, not images"),
        ({"components": [1]}, "not a list of texts"),
        ({"max_items": 0}, "max_items"),
        ({"max_items": True}, "max_items"),
        ({"error": "x"}, "holds an error"),
    ],
)
def test_wrong_info_is_refused(change, says):
    with pytest.raises(RewardFailed, match=says):
        parse_info(orjson.dumps(INFO | change))


def test_errors_are_read_when_they_are_ours():
    assert parse_error(encode_error("oom", "no memory")) == "oom: no memory"
    assert [parse_error(b) for b in (b"", b"[1]", b'{"error":1}', b"<html>")] == [""] * 4


def test_finite_takes_numbers_only():
    assert [finite(v, "x") for v in (0, -0.0, 5, 2**63, np.float64(0.25))] == [0.0, 0.0, 5.0, 2.0**63, 0.25]
