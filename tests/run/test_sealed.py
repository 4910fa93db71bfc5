from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dougong.errors import CheckpointDamaged, MissingExtra, UserError
from dougong.run import sealed
from dougong.run.manifest import LocalPlace
from dougong.run.new_file import DirectFile
from dougong.run.sealed import Sealer, UnsealedPlace, load_sealer, sealed_bytes

CHUNK = 2**20
NAME = "step-000000001-g001/f"


@pytest.fixture(autouse=True)
def _cryptography() -> None:
    pytest.importorskip("cryptography")


def seal(root: Path, content: bytes, *, key: bytes = bytes(32), name: str = NAME) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    inner = DirectFile(str(path), num_bytes=sealed_bytes(len(content)), on_chunk=lambda _: None)
    file = sealed.SealedFile(inner, Sealer(key), name=name)
    view = memoryview(content)
    for start in range(0, len(view), 700_001):
        file.write(view[start : start + 700_001])
    assert file.finish().num_bytes == path.stat().st_size == sealed_bytes(len(content))
    return path


def reading(path: Path, *, key: bytes | None = bytes(32)) -> Any:
    return UnsealedPlace(LocalPlace(), None if key is None else Sealer(key)).open_read(str(path))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 17])
def test_what_was_sealed_reads_as_it_was(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    path = seal(tmp_path, content)
    with reading(path) as file:
        assert file.read() == content
    assert content[:64] not in path.read_bytes() or size < 16


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_part_can_be_read_by_itself(data: st.DataObject, tmp_path: Path) -> None:
    content = os.urandom(2 * CHUNK + 100)
    path = seal(tmp_path, content)
    start = data.draw(st.integers(0, len(content)))
    length = data.draw(st.integers(0, len(content)))
    with reading(path) as file:
        file.seek(start)
        assert file.read(length) == content[start : start + length]


@pytest.mark.parametrize("harm", ["flip", "cut a chunk", "cut a byte", "grow", "swap", "rename", "header"])
def test_no_change_goes_unseen(harm: str, tmp_path: Path) -> None:
    content = os.urandom(3 * CHUNK + 5)
    path = seal(tmp_path, content)
    whole = bytearray(path.read_bytes())
    frame = CHUNK + 16
    match harm:
        case "flip":
            whole[64 + CHUNK + 200] ^= 1
        case "cut a chunk":
            whole = whole[: 64 + 3 * frame]
        case "cut a byte":
            whole = whole[:-1]
        case "grow":
            whole += b"x"
        case "swap":
            first, second = whole[64 : 64 + frame], whole[64 + frame : 64 + 2 * frame]
            whole[64 : 64 + 2 * frame] = second + first
        case "rename":
            path = path.with_name("other")
        case _:
            whole[20] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointDamaged), reading(path) as file:
        file.read()


def test_two_files_of_one_content_have_nothing_in_common(tmp_path: Path) -> None:
    content = bytes(CHUNK)
    first = seal(tmp_path, content).read_bytes()
    second = seal(tmp_path, content, name="step-000000002-g001/f").read_bytes()
    assert first[64:128] != second[64:128]


def test_without_the_key_or_with_another_the_mistake_is_told_in_three_parts(tmp_path: Path) -> None:
    path = seal(tmp_path, b"secret")
    with pytest.raises(UserError, match="encrypted") as caught:
        reading(path, key=None)
    assert "--checkpoint-key" in caught.value.mend
    with pytest.raises(UserError, match="the one given is"):
        reading(path, key=b"x" * 32)


def test_plain_files_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"{}")
    with reading(tmp_path / "manifest.json", key=None) as file:
        assert file.read() == b"{}"


@pytest.mark.parametrize("content", [b"k" * 32, b"ab" * 32, b"ab" * 32 + b"\n"])
def test_a_key_file_holds_bytes_or_digits(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(content)
    assert len(load_sealer(tmp_path / "key").key) == 32


@pytest.mark.parametrize("content", [b"", b"short", b"zz" * 32, b"k" * 33])
def test_anything_else_in_a_key_file_is_refused_without_telling_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_sealer(tmp_path / "key")
    assert not content or content.decode() not in str(caught.value)


def test_the_key_is_not_printed() -> None:
    assert "6b6b" not in repr(Sealer(b"k" * 32)) and "kkkk" not in repr(Sealer(b"k" * 32))


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    (tmp_path / "key").write_bytes(bytes(32))
    with pytest.raises(MissingExtra, match=r"cryptography"):
        load_sealer(tmp_path / "key")
