"""The edges where SI numbers meet people: formatting and parsing. Inside, everything is SI base units."""

from __future__ import annotations

import re

GB = 1e9
GIB = 2**30
MIB = 2**20
MINUTE_S = 60.0
HOUR_S = 3600.0
DAY_S = 86400.0

_DURATION_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*\Z")


def parse_duration_s(text: str) -> float:
    """Seconds of `90`, `90s`, `1.5h`, `30d`. Raises ValueError with the valid units."""
    number, unit = _split(text)
    if unit and unit not in _DURATION_S:
        raise ValueError(f"{text!r}: unit {unit!r} is not one of {', '.join(_DURATION_S)}")
    return number * _DURATION_S.get(unit, 1.0)


def parse_quantity(text: str, *, unit: str) -> float:
    """The number of `unit`s (`B`, `B/s`, `b/s`, `W`, `FLOP/s`) in `80GB`, `400Gb/s`, `2.3kW`, `64GiB`.

    `b/s` is bits a second and `B/s` bytes a second; they are never converted silently. Raises ValueError.
    """
    number, suffix = _split(text)
    if suffix.endswith(unit):
        prefix = suffix[: len(suffix) - len(unit)]
        factor = _PREFIX.get(prefix, _BINARY.get(prefix))
        if factor is not None:
            return number * factor
    raise ValueError(f"{text!r} is not a quantity in {unit}; write for example 10{unit} or 10G{unit}")


def format_duration(duration_s: float) -> str:
    """A duration for people: `850 µs`, `12 ms`, `3.4 s`, `2 min 05 s`, `3 h 12 min`, `54.0 d`."""
    if duration_s < 0:
        return "-" + format_duration(-duration_s)
    if duration_s == 0:
        return "0 s"
    if duration_s < 0.9995e-3:
        return f"{duration_s * 1e6:.0f} µs"
    if duration_s < 0.9995:
        return f"{duration_s * 1e3:.3g} ms"
    if duration_s < 99.95:
        return f"{duration_s:.3g} s"
    if duration_s < HOUR_S:
        minutes, seconds = divmod(round(duration_s), 60)
        return f"{minutes} min {seconds:02d} s"
    if duration_s < 2 * DAY_S:
        hours, minutes = divmod(round(duration_s / 60), 60)
        return f"{hours} h {minutes:02d} min"
    return f"{duration_s / DAY_S:.1f} d"


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, decimal: `512 B`, `1.20 GB`."""
    return format_si(num_bytes, "B")


def format_si(value: float, unit: str) -> str:
    """A value with a decimal prefix and three digits: `1.20 GB`, `312 TFLOP/s`."""
    for prefix in ("E", "P", "T", "G", "M", "k"):
        factor = _PREFIX[prefix]
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def format_ratio(ratio: float) -> str:
    """A ratio as per cent: `98.7 %`."""
    return f"{ratio * 100:.3g} %"


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return float(match[1].replace("_", "")), match[2]
