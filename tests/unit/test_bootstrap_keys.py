"""Key files: nobody else may read them, and what is wrong with one is said."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pdxfer.bootstrap import keys
from pdxfer.bootstrap.settings import good_key


def test_a_pair_is_saved_and_loaded(tmp_path: Path) -> None:
    pair = keys.generate()
    assert good_key(pair.public) and good_key(pair.secret)
    before = os.umask(0)
    try:
        keys.save(tmp_path / "k", pair)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert keys.load(tmp_path / "k") == pair
    assert os.listdir(tmp_path) == ["k"]  # no draft is left


def test_many_pairs(tmp_path: Path) -> None:
    """Z85 has '=' and '#' in its alphabet."""
    for n in range(200):
        pair = keys.generate()
        keys.save(tmp_path / str(n), pair)
        assert keys.load(tmp_path / str(n)) == pair


def test_the_secret_is_not_shown() -> None:
    pair = keys.generate()
    assert pair.secret not in repr(pair)
    assert pair.secret not in f"{pair}"


def test_a_key_in_use_is_never_replaced(tmp_path: Path) -> None:
    pair = keys.generate()
    keys.save(tmp_path / "k", pair)
    with pytest.raises(keys.BadKeyFile, match="exists already"):
        keys.save(tmp_path / "k", keys.generate())
    assert keys.load(tmp_path / "k") == pair
    assert os.listdir(tmp_path) == ["k"]


def test_made_once(tmp_path: Path) -> None:
    assert keys.load_or_make(tmp_path / "k") == keys.load_or_make(tmp_path / "k")
    with pytest.raises(keys.BadKeyFile, match="cannot be written: No such file or directory"):
        keys.load_or_make(tmp_path / "none" / "k")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o777, 0o601])
def test_others_can_read_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "k"
    keys.save(path, keys.generate())
    path.chmod(mode)
    with pytest.raises(keys.BadKeyFile, match=f"mode {mode:04o}, expected 0600.*chmod 600 {path}"):
        keys.load(path)


PAIR = keys.generate()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no line public"),
        (f"public = {PAIR.public}\n".encode(), "no line secret"),
        (f"public = {PAIR.public}\nsecret = {PAIR.secret[:-1]}\n".encode(), "no key in Z85"),
        (f"public = {PAIR.public}\nsecret = {'~' * 40}\n".encode(), "no key in Z85"),
        (f"public = {PAIR.public}\nsecret = {keys.generate().secret}\n".encode(), "does not belong to the secret"),
        (b"\xff\xfe\x00", "it is not text"),
        (b"public = x\n" + b"#" * 10_000, "no line secret"),
    ],
)
def test_no_key_file(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "k"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(keys.BadKeyFile, match=says) as found:
        keys.load(path)
    assert PAIR.secret not in str(found.value)


def test_a_missing_one_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(keys.BadKeyFile, match="does not exist; make one with: pdxfer keygen"):
        keys.load(tmp_path / "k")
    with pytest.raises(keys.BadKeyFile, match="cannot be read: Is a directory"):
        keys.load(tmp_path)
