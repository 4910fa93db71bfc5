from __future__ import annotations

from dougong.sim.chance import Chance


def test_the_same_seed_and_name_give_the_same_numbers_everywhere() -> None:
    # The numbers themselves: a seed in a report must mean the same run next year.
    assert Chance(1).of("a").random() == 0.14406050801016135


def test_a_draw_from_one_stream_shifts_no_other() -> None:
    plain, disturbed = Chance(7), Chance(7)
    disturbed.of("repair").random()
    assert [plain.of("faults").random() for _ in range(5)] == [disturbed.of("faults").random() for _ in range(5)]


def test_a_stream_goes_on_where_it_was_left() -> None:
    chance = Chance(7)
    first, second = chance.of("x").random(), chance.of("x").random()
    whole = Chance(7).of("x")
    assert [first, second] == [whole.random(), whole.random()]


def test_other_seeds_and_names_give_other_numbers() -> None:
    drawn = {Chance(seed).of(name).random() for seed in range(10) for name in ("a", "b")}
    assert len(drawn) == 20
