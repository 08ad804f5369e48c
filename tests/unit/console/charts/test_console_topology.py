"""The picture of the mesh: places of members, groups in a large mesh, marks of problems."""

from __future__ import annotations

import json
from typing import Any

from console_svc.charts.topology import GROUPS_MAX, MEMBERS_MAX, topology
from tests.kit.console import large_mesh, loaded, member, pairs, small_mesh


def _cards(members: Any) -> dict[str, Any]:
    picture = topology(members)
    nodes = picture.option["series"][2]["data"]
    return {card.title: node for card, node in zip(picture.cards, nodes, strict=True)}


def test_each_member_of_a_small_mesh_is_one_card_with_a_link() -> None:
    members = small_mesh()
    picture = topology(members)
    assert sorted(card.link for card in picture.cards) == sorted(m.name for m in members)
    assert not picture.is_grouped


def test_a_member_keeps_its_place_when_the_load_changes() -> None:
    before, after = (
        _cards([member("router-0", "router"), loaded("w-0", used), loaded("w-1", 5)])
        for used in (10, 90)
    )
    assert {n: c["value"] for n, c in before.items()} == {n: c["value"] for n, c in after.items()}


def test_prefill_stands_left_of_decode_with_an_arrow_between() -> None:
    picture = topology([member("frontend-0", "frontend"), *pairs(1)])
    cards = {
        card.role: node["value"][0]
        for card, node in zip(picture.cards, picture.option["series"][2]["data"], strict=True)
    }
    assert cards["frontend"] < cards["prefill"] < cards["decode"]
    captions = [c["label"]["formatter"] for c in picture.option["series"][3]["data"]]
    assert "KV" in captions


def test_a_thousand_workers_are_groups_in_a_picture_of_bounded_size() -> None:
    members = large_mesh(1000)
    picture = topology(members)
    assert picture.is_grouped
    workers = [card for card in picture.cards if card.role in ("prefill", "decode")]
    assert sum(len(card.members) for card in workers) == 1000
    assert len(workers) <= GROUPS_MAX
    assert len(json.dumps(picture.option)) < 60_000


def test_no_two_cards_of_any_mesh_overlap() -> None:
    for members in (small_mesh(), pairs(MEMBERS_MAX // 2), large_mesh(200, domains=4)):
        picture = topology(members)
        places = [tuple(node["value"]) for node in picture.option["series"][2]["data"]]
        assert len(set(places)) == len(places)
        assert all(0 < x < picture.width and 0 < y < picture.height for x, y in places)


def test_a_problem_has_a_shape_and_a_word_beside_its_colour() -> None:
    cards = _cards([member("w-0", health="failing", failure="probe timed out")])
    label = cards["w-0"]["label"]["formatter"]
    assert "▲" in label
    assert "failing: probe" in label
    assert "failing: probe timed out" in cards["w-0"]["name"]


def test_a_worker_that_gets_no_work_is_marked_although_it_serves() -> None:
    cards = _cards([member("w-0", is_routable=False)])
    assert "▲" in cards["w-0"]["label"]["formatter"]


def test_an_empty_mesh_is_a_picture_without_cards() -> None:
    picture = topology([])
    assert picture.cards == ()
    assert picture.height > 0
