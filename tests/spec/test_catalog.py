"""The catalog: names, aliases, SI figures, disputed figures, link tables."""

from __future__ import annotations

import msgspec
import pytest

from dougong.errors import UserError
from dougong.spec.catalog import accelerator, accelerators, link_table, link_table_names
from dougong.spec.catalog.links import parse_link_tables


@pytest.mark.parametrize("name", ["A100-80G-SXM", "A100-80G-SXM4", "a100-80g-sxm", "a100", "NVIDIA A100-SXM4-80GB"])
def test_aliases_and_case_name_the_same_accelerator(name: str) -> None:
    assert accelerator(name).name == "A100-80G-SXM4"


def test_figures_are_in_base_units() -> None:
    h100 = accelerator("H100")
    assert h100.bf16_flop_per_s == 989e12
    assert h100.peak_flop_per_s("fp8") == 1979e12
    assert h100.peak_flop_per_s("fp4") is None
    assert h100.measured_bf16_flop_per_s == 794.5e12
    assert h100.memory_bytes == 80e9
    assert h100.memory_bytes_per_s == 3.35e12
    assert h100.scale_up_bytes_per_s == 450e9
    assert h100.nic_bytes_per_s == 50e9
    assert h100.tdp_w == 700


def test_one_pair_is_slower_than_all_peers_where_links_are_direct() -> None:
    mi300x = accelerator("MI300X")
    assert mi300x.scale_up_bytes_per_s == 448e9
    assert mi300x.scale_up_pair_bytes_per_s == 64e9


def test_what_is_not_published_is_none() -> None:
    assert accelerator("H20").memory_bytes_per_s is None
    assert accelerator("cpu").bf16_flop_per_s is None


def test_a_disputed_figure_is_marked() -> None:
    ascend = accelerator("Ascend 910B3")
    assert ascend.confidence == "conflicting"
    assert {"bf16_flop_per_s", "memory_bytes_per_s", "tdp_w"} <= set(ascend.conflicts)
    assert accelerator("H100").conflicts == ()


def test_every_accelerator_names_its_source_and_every_name_is_its_own() -> None:
    kinds = accelerators()
    assert all(kind.source for kind in kinds)
    assert all(accelerator(word) is kind for kind in kinds for word in (kind.name, *kind.aliases))
    assert len(kinds) == 26


def test_an_unknown_accelerator_is_told_the_nearest() -> None:
    for wrong, right in (("MI300", "MI300X"), ("h10", "H100")):
        with pytest.raises(UserError) as caught:
            accelerator(wrong)
        assert f"did you mean {right!r}?" in caught.value.mend


def test_a_kind_of_ones_own_goes_first() -> None:
    own = msgspec.structs.replace(accelerator("H100"), tdp_w=500.0)
    assert accelerator("h100-80g-sxm5", own=(own,)).tdp_w == 500


@pytest.mark.parametrize("name", link_table_names())
def test_a_link_table_joins_eight_modules_evenly(name: str) -> None:
    table = link_table(name)
    assert table.num_modules == 8
    assert len({table.degree(module) for module in table.modules}) == 1
    assert table.source


@pytest.mark.parametrize("name", [name for name in link_table_names() if name.startswith("FC8")])
def test_fully_connected_joins_each_pair_once(name: str) -> None:
    table = link_table(name)
    pairs = [(a, b) for a in table.modules for b in table.modules if a < b]
    assert {table.num_links(a, b) for a, b in pairs} == {1}


@pytest.mark.parametrize(
    "links",
    ['["0.1","1.1"],["0.1","2.1"]', '["0.1","1.1"],["0.1L","2.1"]', '["0.1L","1.1"],["0.1","2.1"]', '["0.1","0.2"]'],
)
def test_a_port_is_wired_once(links: str) -> None:
    with pytest.raises(UserError, match=r"port 0\.1"):
        parse_link_tables('{"note": "", "topologies": {"t": {"src": "", "lanes": 8, "links": [' + links + "]}}}")


def test_two_halves_of_a_port_may_go_two_ways() -> None:
    text = '{"note": "", "topologies": {"t": {"src": "", "lanes": 8, "links": [["0.1L","1.1L"],["0.1H","2.1L"]]}}}'
    (table,) = parse_link_tables(text)
    assert table.degree(0) == 2


def test_an_unknown_link_table_is_told_the_valid_ones() -> None:
    with pytest.raises(UserError) as caught:
        link_table("FC8_7P_x8_r2.1")
    assert "did you mean 'FC8_7P_x8_r2.0'?" in caught.value.mend
