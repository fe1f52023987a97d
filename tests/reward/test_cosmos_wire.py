"""The bytes of cosmos-rl: read as its documentation writes them, and refused in every other form."""

import io
import json
import pickle
from urllib.parse import parse_qs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nftctl.errors import RewardFailed
from nftctl.reward.cosmos_wire import (
    Task,
    Ticket,
    batch_of,
    decode_batch,
    encode_ping,
    encode_pull,
    encode_result,
    encode_task,
    encode_ticket,
    parse_pull,
    parse_result,
    parse_task,
    parse_ticket,
)
from nftctl.reward.protocol import RequestRefused

IMAGES = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)


def npy(array, **options):
    out = io.BytesIO()
    np.save(out, array, **{"allow_pickle": False} | options)
    return out.getvalue()


def body(blob=None, **changes):
    """An enqueue as any client of that service would write it."""
    head = {"prompts": ["a", "b"], "reward_fn": {"hpsv2": 1.0}, "media_type": "image"} | changes
    return json.dumps(head).encode() + b"\n" + (npy(IMAGES) if blob is None else blob)


# ---- enqueue


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.just(3))))
def test_a_task_survives_and_is_json_newline_npy(images):
    prompts = [f"prompt\n{n} é" for n in range(len(images))]
    sent = encode_task(Task(prompts, images, {"ocr": 1.0}, {"ocr_use_gpu": False}))
    head, _, blob = sent.partition(b"\n")
    assert json.loads(head) == {
        "prompts": prompts, "reward_fn": {"ocr": 1.0}, "media_type": "image", "ocr_use_gpu": False
    }  # fmt: skip
    np.testing.assert_array_equal(np.load(io.BytesIO(blob), allow_pickle=False), images)
    back = parse_task(sent, max_items=3)
    np.testing.assert_array_equal(back.images, images)
    assert (back.prompts, back.reward_fn, back.extras) == (prompts, {"ocr": 1.0}, {"ocr_use_gpu": False})


def test_names_of_no_positive_weight_are_not_wanted():
    task = parse_task(body(reward_fn={"a": 1.0, "b": 0, "c": -1.0, "d": 0.5}), max_items=9)
    assert task.wanted == ["a", "d"]


def test_column_order_and_the_second_format_version_are_read():
    blob = npy(np.asfortranarray(IMAGES))
    assert b"'fortran_order': True" in blob
    np.testing.assert_array_equal(decode_batch(blob), IMAGES)
    out = io.BytesIO()
    np.lib.format.write_array(out, IMAGES, version=(2, 0), allow_pickle=False)
    np.testing.assert_array_equal(decode_batch(out.getvalue()), IMAGES)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b'{"prompts": []}', "no newline"),
        (b"[1]\n", "not an object"),
        (b"{\n", "not JSON"),
        (body(media_type="latent"), "'latent'; this service scores image only"),
        (json.dumps({"prompts": []}).encode() + b"\n", "'video'; this service scores image only"),
        (body(prompts="a"), "not a list of texts"),
        (body(prompts=["a", 1]), "not a list of texts"),
        (body(prompts=["a"]), "2 images for 1 prompts"),
        (body(reward_fn={}), "not an object of names"),
        (body(reward_fn=["hpsv2"]), "not an object of names"),
        (body(reward_fn={"hpsv2": "1"}), "the weight of 'hpsv2' is '1', not a number"),
        (body(reward_fn={"hpsv2": float("nan")}), "not a finite number"),
        (body(b""), "not a readable .npy"),
        (body(b"\x93NUMPY\x03\x00" + bytes(200)), r"version 3\.0, known are"),
        (body(b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535), "not a readable .npy"),
        (body(npy(IMAGES)[:-1]), r"119 bytes where its shape \[2, 4, 5, 3\] needs 120"),
        (body(npy(IMAGES) + b"x"), "121 bytes"),
        (body(npy(IMAGES.astype(np.float32))), r"must be uint8 \[B, H, W, 3\], got float32"),
        (body(npy(IMAGES.transpose(0, 3, 1, 2))), r"got uint8 \[2, 3, 4, 5\]"),
        (body(npy(IMAGES[0])), r"got uint8 \[4, 5, 3\]"),
        (body(npy(IMAGES[:0])), r"got uint8 \[0, 4, 5, 3\]"),
    ],
)
def test_what_is_not_a_task_is_400_and_says_why(sent, says):
    with pytest.raises(RequestRefused, match=says) as caught:
        parse_task(sent, max_items=64)
    assert caught.value.status == 400


def test_a_task_of_too_many_images_is_413():
    with pytest.raises(RequestRefused, match="2 images in one task; this service takes at most 1") as caught:
        parse_task(body(), max_items=1)
    assert caught.value.status == 413


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def test_no_pickle_is_ever_loaded():
    for blob in (npy(np.array([Bomb()]), allow_pickle=True), pickle.dumps(IMAGES)):
        with pytest.raises(RewardFailed):
            decode_batch(blob)


@pytest.mark.parametrize(
    ("shape", "says"), [((2, 4096, 4096, 3), "0 bytes where its shape"), ((1, 2**13, 2**12, 3), "outside 1 to")]
)
def test_a_huge_declared_shape_costs_nothing(shape, says):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with pytest.raises(RewardFailed, match=says):
        decode_batch(out.getvalue())


def test_a_batch_is_of_one_size_and_a_task_of_sound_images():
    assert batch_of(list(IMAGES)).shape == (2, 4, 5, 3)
    with pytest.raises(RewardFailed, match="2 different sizes"):
        batch_of([IMAGES[0], IMAGES[1][:2]])
    with pytest.raises(RewardFailed, match="must be uint8"):
        encode_task(Task(["a", "b"], IMAGES.astype(np.float32), {"a": 1.0}))  # type: ignore[arg-type]
    with pytest.raises(RewardFailed, match="cannot be sent"):
        encode_task(Task(["a", "b"], IMAGES, {"a": 1.0}, {"tags": object()}))


def test_tickets():
    assert parse_ticket(encode_ticket(Ticket("u-1"))) == Ticket("u-1")
    assert parse_ticket(encode_ticket(Ticket("u-1", "r-2"))) == Ticket("u-1", "r-2")
    assert json.loads(encode_ticket(Ticket("u-1"))) == {"uuid": "u-1"}
    assert parse_ticket(b'{"uuid": "u", "replica_id": null}') == Ticket("u")


@pytest.mark.parametrize(
    "reply",
    [b"{}", b'{"uuid": 7}', b'{"uuid": ""}', b'{"uuid": "a b"}', b'{"uuid": "a\\r\\nX: y"}', b'{"uuid": "\xc3\xa9"}',
     b'{"uuid": "u", "replica_id": 3}', b'{"uuid": "u", "replica_id": "a\\nb"}', b'{"uuid": "u", "error": "full"}',
     b"<html>", b'"u"'],
)  # fmt: skip
def test_what_is_not_a_ticket_is_refused(reply):
    with pytest.raises(RewardFailed):
        parse_ticket(reply)


# ---- ping and pull


def test_ping_and_pull_are_forms():
    assert parse_qs(encode_pull("u&1", "ocr").decode()) == {"uuid": ["u&1"], "type": ["ocr"]}
    info = json.loads(parse_qs(encode_ping("ocr").decode())["info_data"][0])
    assert info["reward_fn"] == {"ocr": 1.0}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        (b"uuid=u%261&type=ocr", ("u&1", "ocr")),
        (b"uuid=u", ("u", "dance_grpo")),
        (b"uuid=u&type=", ("u", "dance_grpo")),
        ({"uuid": "u", "type": "ocr"}, ("u", "ocr")),
    ],
)
def test_a_pull_names_task_and_type(fields, asked):
    assert parse_pull(fields) == asked


@pytest.mark.parametrize("fields", [b"", b"type=ocr", b"uuid=", b"\xff", b'{"uuid": "u"}', {}])
def test_a_pull_without_a_task_is_400(fields):
    with pytest.raises(RequestRefused) as caught:
        parse_pull(fields)
    assert caught.value.status == 400


def test_a_result_survives_and_has_the_documented_fields():
    sent = encode_result("ocr", {"ocr_reward": [0.0, 1.0]}, IMAGES, 0.125)
    assert json.loads(sent) == {
        "scores": {"ocr_reward": [0.0, 1.0]}, "duration": "0.12", "decoded_duration": "0.00", "type": "ocr",
        "input_info": {"shape": [2, 4, 5, 3], "dtype": "torch.uint8", "min": "0.000", "max": "119.000"},
    }  # fmt: skip
    assert parse_result(sent, ["ocr_reward"], 2) == {"ocr_reward": [0.0, 1.0]}
    with pytest.raises(RewardFailed, match="ocr_reward of image 1 is nan"):
        encode_result("ocr", {"ocr_reward": [0.0, float("nan")]}, IMAGES, 0.0)


def test_documented_results_are_read_whatever_stands_beside_the_score():
    groups = {"counting": [-10.0], "colors": [1.0]}
    sent = json.dumps({"scores": {"gen_eval_score": [0.5], "gen_eval_group": groups, "prediction": ["Good"]}})
    assert parse_result(sent.encode(), ["gen_eval_score"], 1) == {"gen_eval_score": [0.5]}
    with pytest.raises(RewardFailed, match=r"is {'counting'.*not a list"):
        parse_result(sent.encode(), ["gen_eval_group"], 1)
    with pytest.raises(RewardFailed, match="'prediction' of image 0 is 'Good', not a number"):
        parse_result(sent.encode(), ["prediction"], 1)


def test_a_missing_key_lists_those_that_exist():
    sent = b'{"scores": {"b": [1], "a": [2]}}'
    with pytest.raises(RewardFailed, match=r"no score 'hpsv2'; there are: a, b"):
        parse_result(sent, ["a", "hpsv2"], 1)
    with pytest.raises(RewardFailed, match=r"there are: none"):
        parse_result(b'{"scores": {}}', ["a"], 1)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b'{"scores": {"a": [1]}}', "1 scores under 'a' for 2 images"),
        (b'{"scores": {"a": [1, 2, 3]}}', "3 scores under 'a'"),
        (b'{"scores": {"a": [1, NaN]}}', "'a' of image 1 is nan"),
        (b'{"scores": {"a": [1, Infinity]}}', "'a' of image 1 is inf"),
        (b'{"scores": {"a": [1, 1e999]}}', "'a' of image 1 is inf"),
        (b'{"scores": {"a": [null, 1]}}', "'a' of image 0 is null"),
        (b'{"scores": {"a": [1, true]}}', "'a' of image 1 is true"),
        (b'{"scores": {"a": [1, "1.0"]}}', "'a' of image 1 is '1.0'"),
        (b'{"scores": {"a": 1}}', "not a list of numbers"),
        (b'{"scores": [1, 2]}', "not an object"),
        (b'{"message": "done"}', "scores of the result is null"),
        (b'{"error": "oom", "scores": {"a": [1, 2]}}', "holds an error"),
        (b"<html>", "not JSON"),
    ],
)
def test_a_result_that_cannot_be_trusted_is_refused(sent, says):
    with pytest.raises(RewardFailed, match=says):
        parse_result(sent, ["a"], 2)
