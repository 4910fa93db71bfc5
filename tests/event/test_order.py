from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dougong.event.kinds import Cause, NodeRepaired, Recorded
from dougong.event.order import merged, ordered

EVENT = NodeRepaired(component="n")


def record(stream: str, seq: int, time_ns: int, cause: tuple[str, int] | None = None) -> Recorded:
    return Recorded(
        stream=stream,
        seq=seq,
        time_ns=time_ns,
        event=EVENT,
        cause=None if cause is None else Cause(stream=cause[0], seq=cause[1]),
    )


@st.composite
def logs(draw: st.DrawFn, *, is_causal: bool) -> list[Recorded]:
    """Several streams with clocks as they like. `is_causal`: a cause was written before its effect."""
    num_records = draw(st.integers(0, 25))
    written: list[Recorded] = []
    last_seq: dict[str, int] = {}
    for _ in range(num_records):
        stream = draw(st.sampled_from("abcd"))
        last_seq[stream] = last_seq.get(stream, 0) + 1
        earlier = st.sampled_from([(one.stream, one.seq) for one in written]) if written else st.none()
        anything = st.tuples(st.sampled_from("abcde"), st.integers(1, 12))
        cause = draw(st.none() | (earlier if is_causal else anything))
        written.append(record(stream, last_seq[stream], draw(st.integers(0, 20)), cause))
    return written


def keys(records: list[Recorded]) -> list[tuple[str, int]]:
    return [(one.stream, one.seq) for one in records]


@given(logs(is_causal=True))
def test_no_effect_comes_before_its_cause_however_the_clocks_are_skewed(log: list[Recorded]) -> None:
    place = {key: index for index, key in enumerate(keys(list(ordered(log))))}
    for one in log:
        if one.cause is not None:
            assert place[(one.cause.stream, one.cause.seq)] < place[(one.stream, one.seq)]


@given(logs(is_causal=False))
def test_every_record_comes_once_and_no_stream_leaves_its_own_order(log: list[Recorded]) -> None:
    result = list(ordered(log))
    assert sorted(keys(result)) == sorted(keys(log))
    for stream in "abcd":
        seqs = [one.seq for one in result if one.stream == stream]
        assert seqs == sorted(seqs)


@given(logs(is_causal=False), st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_how_the_records_came(log: list[Recorded], random: object) -> None:
    shuffled = list(log)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert list(ordered(shuffled)) == list(ordered(log))


@given(logs(is_causal=False))
def test_merging_sorted_streams_is_ordering_all(log: list[Recorded]) -> None:
    streams = {name: iter([one for one in log if one.stream == name]) for name in "abcd"}
    assert list(merged(streams)) == list(ordered(log))


@given(logs(is_causal=False))
def test_ordering_twice_changes_nothing(log: list[Recorded]) -> None:
    once = list(ordered(log))
    assert list(ordered(once)) == once


@given(logs(is_causal=True))
def test_with_agreeing_clocks_the_order_is_time_then_stream_then_seq(log: list[Recorded]) -> None:
    agreeing = [record(one.stream, one.seq, index // 2) for index, one in enumerate(log)]
    assert list(ordered(agreeing)) == sorted(agreeing, key=lambda one: (one.time_ns, one.stream, one.seq))


def test_an_effect_on_a_late_clock_comes_right_behind_its_cause() -> None:
    cause, effect, other = record("a", 1, 100), record("b", 1, 5, ("a", 1)), record("c", 1, 101)
    assert list(ordered([other, effect, cause])) == [cause, effect, other]


def test_a_missing_cause_holds_nothing_up() -> None:
    log = [record("a", 1, 1, ("gone", 7)), record("a", 2, 2, ("b", 99)), record("b", 1, 3)]
    assert keys(list(ordered(log))) == [("a", 1), ("b", 1), ("a", 2)]


def test_a_circle_of_causes_is_broken_at_its_earliest_and_those_outside_keep_their_rule() -> None:
    outside = record("a", 1, 0, ("b", 1))
    circle = [record("b", 1, 9, ("c", 1)), record("c", 1, 8, ("b", 1))]
    assert keys(list(ordered([outside, *circle]))) == [("c", 1), ("b", 1), ("a", 1)]


def test_an_event_that_names_itself_as_its_cause_is_kept() -> None:
    log = [record("a", 1, 1, ("a", 1)), record("a", 2, 2, ("a", 5)), record("a", 3, 3)]
    assert list(ordered(log)) == log


def test_a_hundred_thousand_records_with_causes_across_streams_are_ordered() -> None:
    num_each = 25_000
    log = [
        record(stream, seq, seq * 10 + skew, (before, seq) if before else None)
        for stream, before, skew in (("a", "", 900), ("b", "a", 500), ("c", "b", 100), ("d", "c", -300))
        for seq in range(1, num_each + 1)
    ]
    result = list(ordered(log))
    assert len(result) == 4 * num_each
    assert keys(result[:4]) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
