"""The bounds of numbers in files, as types: what a loader refuses before any formula sees it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern=r"[A-Za-z0-9][A-Za-z0-9._+-]*\Z")]
