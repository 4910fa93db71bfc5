"""The converter: from a tree of YAML to frozen structs, with every mistake at its line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.errors import Problems, UserError
from dougong.spec.dump import dump_typed
from dougong.spec.limits import AtLeastOne, Count, Name, NotNegative, Positive, Ratio
from dougong.spec.typed import Flaw, convert
from dougong.spec.yaml_source import parse_yaml


class Wheel(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    weight_bytes: Positive
    kind: Literal["small", "large"] = "small"


class Cart(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    wheels: tuple[Wheel, ...] = ()
    speed_bytes_per_s: Positive | None = None
    power_w: NotNegative = 0.0
    run_s: NotNegative = 0.0
    num_seats: Count = 0
    load_ratio: Ratio = 0.0
    is_open: bool = False
    driver: AtLeastOne | Literal["any"] | None = None
    tags: tuple[str, ...] = ()

    def flaws(self) -> Iterator[Flaw]:
        for index, wheel in enumerate(self.wheels):
            if wheel.weight_bytes > 1e9:
                yield Flaw(f"wheels[{index}].weight_bytes", "the wheel is too heavy", mend="choose a lighter one")
        if self.num_seats > 8:
            yield Flaw("num_seats", "nine do not fit", mend="fewer", is_warning=True)
        if self.title == "needs wheels" and not self.wheels:
            yield Flaw("title", "no wheels", mend="add", needs=("wheels",))


def read(text: str, warned: list[UserError] | None = None) -> Cart:
    return convert(parse_yaml(text, file="cart.yaml"), Cart, warn=[].append if warned is None else warned.append)


def problems(text: str) -> list[tuple[str, str, str]]:
    with pytest.raises(Problems) as caught:
        read(text)
    return [(problem.where, problem.what, problem.mend) for problem in caught.value.problems]


def test_numbers_may_carry_their_unit() -> None:
    cart = read("title: x\nspeed: 400Gb/s\npower: 2.3kW\nrun: 1.5h\nload_ratio: 5%\n")
    assert cart.speed_bytes_per_s == 50e9
    assert cart.power_w == 2300
    assert cart.run_s == 5400
    assert cart.load_ratio == 0.05


def test_numbers_may_be_in_base_units_under_the_long_key() -> None:
    cart = read("title: x\nspeed_bytes_per_s: 5e10\npower_w: 2_300\nrun_s: 90s\n")
    assert (cart.speed_bytes_per_s, cart.power_w, cart.run_s) == (50e9, 2300, 90)


def test_the_short_key_takes_no_bare_number() -> None:
    ((where, what, mend),) = problems("title: x\npower: 2300\n")
    assert where == "cart.yaml:2 power"
    assert "no unit" in what
    assert "10.2kW" in mend


def test_a_text_is_what_stands_in_the_file() -> None:
    assert read("title: on").title == "on"
    assert read("title: 007").title == "007"
    assert read("title: 2024-01-01").title == "2024-01-01"
    assert read("title: 'null'").title == "null"


def test_a_tuple_may_be_a_table_by_first_field() -> None:
    as_list = read("title: x\nwheels: [{name: a, weight: 1kB}, {name: b, weight: 2kB, kind: large}]")
    as_table = read("title: x\nwheels: {a: 1kB, b: {weight: 2kB, kind: large}}")
    assert as_list == as_table


def test_an_alternative_that_fits_is_taken() -> None:
    assert read("title: x\ndriver: 3").driver == 3
    assert read("title: x\ndriver: any").driver == "any"
    assert read("title: x\ndriver: ~").driver is None
    ((where, _, mend),) = problems("title: x\ndriver: who")
    assert where == "cart.yaml:2 driver"
    assert "any" in mend


def test_every_problem_of_a_file_is_told_at_once_with_its_line() -> None:
    text = """\
titel: x
wheels:
  - {name: a, weight: 80GX}
  - {name: b, weight: 2GB}
  - {name: c, weight: 1kB, kind: smal}
  - {weight: 1kB}
num_seats: -1
is_open: yes
nonsense: 1
tags: word
title: y
title: z
"""
    found = problems(text)
    assert [where for where, _, _ in found] == [
        "cart.yaml:1 titel",
        "cart.yaml:3 wheels[0].weight",
        "cart.yaml:4 wheels[1].weight",
        "cart.yaml:5 wheels[2].kind",
        "cart.yaml:6 wheels[3].name",
        "cart.yaml:7 num_seats",
        "cart.yaml:8 is_open",
        "cart.yaml:9 nonsense",
        "cart.yaml:10 tags",
        "cart.yaml:12",
    ]


def test_a_misspelt_key_is_read_as_the_one_meant() -> None:
    ((_, what, mend),) = problems("titel: x")
    assert "'titel'" in what
    assert "did you mean 'title'?" in mend


def test_a_misspelt_choice_is_told_the_valid_ones() -> None:
    ((_, _, mend),) = problems("title: x\nwheels: {a: {weight: 1kB, kind: smal}}")
    assert mend == "did you mean 'small'? valid: large, small"


def test_a_field_given_by_both_keys_is_an_error() -> None:
    ((where, what, _),) = problems("title: x\npower: 1W\npower_w: 2")
    assert where == "cart.yaml:3 power_w"
    assert "twice" in what


def test_no_problem_is_told_that_only_follows_from_another() -> None:
    assert len(problems("title: needs wheels\nwheels: 3")) == 1


def test_a_warning_stops_nothing() -> None:
    warned: list[UserError] = []
    assert read("title: x\nnum_seats: 9", warned).num_seats == 9
    assert [warning.where for warning in warned] == ["cart.yaml:2 num_seats"]


@pytest.mark.parametrize("number", [".inf", "nan", "1e999", "9" * 400, "0x10", "1:30", "1__0", "--1"])
def test_an_odd_number_is_refused(number: str) -> None:
    assert len(problems(f"title: x\npower_w: {number}")) == 1


@pytest.mark.parametrize("text", ["[]", "3", "[{title: x}]", "title: {a: b}", "title: [a]", "wheels: {a: [1]}", "{}"])
def test_the_wrong_shape_is_told(text: str) -> None:
    assert problems(text)


WHEELS = st.builds(
    Wheel,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,8}", fullmatch=True),
    weight_bytes=st.floats(1e-3, 1e9) | st.integers(1, 10**9).map(float),
    kind=st.sampled_from(["small", "large"]),
)
CARTS = st.builds(
    Cart,
    title=st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=20),
    wheels=st.lists(WHEELS, max_size=4).map(tuple),
    speed_bytes_per_s=st.none() | st.floats(1e-9, 1e18),
    power_w=st.floats(0, 1e18),
    run_s=st.floats(0, 1e12),
    num_seats=st.integers(0, 10**12),
    load_ratio=st.floats(0, 1),
    is_open=st.booleans(),
    driver=st.none() | st.just("any") | st.integers(1, 9),
    tags=st.lists(st.text(max_size=5), max_size=3).map(tuple),
)


@given(CARTS)
def test_load_of_dump_is_the_same(cart: Cart) -> None:
    assert read(dump_typed(cart)) == cart
