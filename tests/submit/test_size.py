"""How many nodes a profile gets: by hand-worked cases."""

from __future__ import annotations

import pytest

from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.submit.size import Size, size_of


@pytest.mark.parametrize(
    ("ranks", "per_node", "group", "expected"),
    [
        (4, 8, None, Size(1, 4, 4, 4, 16)),
        (8, 8, None, Size(1, 8, 8, 8, 32)),
        (9, 8, None, Size(2, 9, 5, 5, 20)),  # evenly: 5 and 4, not 8 and 1
        (16, 8, None, Size(2, 16, 8, 8, 32)),
        (24, 1, None, Size(24, 24, 1, 1, 4)),
        (12, 8, 4, Size(2, 12, 8, 8, 32)),  # 6 and 6 would cut the second group
        (12, 8, 6, Size(2, 12, 6, 6, 24)),
        (16, 4, 8, Size(4, 16, 4, 4, 16)),  # a group that no node holds is cut anyway
    ],
)
def test_the_fewest_nodes_filled_evenly(ranks: int, per_node: int, group: int | None, expected: Size) -> None:
    sets = ["grid.device=cuda", f"rl.group_size={ranks}", *([f"grid.shard_group={group}"] if group else [])]
    profile = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=sets, env={}).profile
    assert size_of(profile, per_node) == expected


@pytest.mark.parametrize(
    ("name", "device", "gpus", "words"),
    [
        ("tiny_t2i_cpu", "auto", 0, 'made for CPUs: no GPUs are asked for; grid.device = "cuda" asks for them'),
        ("scenes_t2i_cpu", "auto", 0, "scenes_t2i_cpu is made for CPUs"),
        ("tiny_t2i_cpu", "cuda", 4, ""),
        ("cosmos3_nft_t2i_public_4gpu", "auto", 4, 'a GPU is asked for per rank; grid.device = "cpu" asks for none'),
        ("cosmos3_nft_t2i_public_4gpu", "cuda", 4, ""),
        ("cosmos3_nft_t2i_public_4gpu", "cpu", 0, ""),
    ],
)
def test_a_device_that_is_left_open_follows_the_contract(name: str, device: str, gpus: int, words: str) -> None:
    profile = load_profile(bundled_profiles()[name], sets=[f"grid.device={device}"], env={}).profile
    size = size_of(profile, 8)
    assert (size.ranks_per_node, size.gpus, size.cpus) == (4, gpus, 4 * gpus or 4)
    assert words in size.why
    assert bool(size.why) is (device == "auto")


def test_on_cpus_there_are_no_gpus_and_a_cpu_for_each_rank() -> None:
    profile = load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=['grid.device="cpu"'], env={}).profile
    assert size_of(profile, 2) == Size(nodes=2, ranks=4, ranks_per_node=2, gpus=0, cpus=2)
    assert size_of(profile, 2, 64).cpus == 64
    assert size_of(profile, 2).describe() == "4 ranks on 2 nodes with 2 CPUs each"
    assert size_of(profile, 8, 1).describe() == "4 ranks on 1 node with 1 CPU"
