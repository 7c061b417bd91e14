"""CURVE key pairs: made, kept in a file that only its owner reads, loaded.

Owns: the key file. Must not: decide who is trusted.

The file holds two lines, ``public = …`` and ``secret = …``, each key in Z85 (40 characters, ZeroMQ RFC 32).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

import zmq

LONGEST: Final = 4096  # bytes that are read of a key file


class BadKeyFile(Exception):
    """A key file that cannot be used; the message says why and what to do."""


class KeyPair(NamedTuple):
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=…)"


def generate() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def save(path: Path, keys: KeyPair) -> None:
    """Write a new file with mode 0600, whole or not at all. Raises BadKeyFile when there is one already."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(f"public = {keys.public}\nsecret = {keys.secret}\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)  # unlike a rename it never replaces a key that is in use
        finally:
            os.unlink(draft)
    except FileExistsError:
        raise BadKeyFile(f"{path} exists already; remove it first if its key is to be replaced") from None
    except OSError as error:
        raise BadKeyFile(f"{path} cannot be written: {error.strerror}") from error


def load(path: Path) -> KeyPair:
    """Read a key file. Raises BadKeyFile: missing, readable by others, or not a pair."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(LONGEST).decode("ascii")
    except FileNotFoundError:
        raise BadKeyFile(f"{path} does not exist; make one with: pdxfer keygen {path}") from None
    except OSError as error:
        raise BadKeyFile(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise BadKeyFile(f"{path} is no key file: it is not text; make one with: pdxfer keygen") from None
    if stat.S_IMODE(mode) & 0o077:
        raise BadKeyFile(
            f"{path} has mode {stat.S_IMODE(mode):04o}, expected 0600: others can read the secret; chmod 600 {path}"
        )
    lines = (line.partition("=") for line in text.splitlines())  # at the first one: Z85 may hold '=' itself
    found = {name.strip(): value.strip() for name, _, value in lines}
    try:
        pair = KeyPair(found["public"], found["secret"])
        derived = zmq.curve_public(pair.secret.encode()).decode()
    except KeyError as error:
        raise BadKeyFile(
            f"{path} is no key file: it has no line {error.args[0]} = …; make one with: pdxfer keygen"
        ) from None
    except (zmq.ZMQError, ValueError):
        raise BadKeyFile(f"{path} is no key file: its secret is no key in Z85; make one with: pdxfer keygen") from None
    if derived != pair.public:
        raise BadKeyFile(
            f"{path}: the public key does not belong to the secret one; make a new pair with: pdxfer keygen"
        )
    return pair


def load_or_make(path: Path) -> KeyPair:
    """The pair in ``path``, made at the first start."""
    if not path.exists():
        try:
            save(path, generate())
        except BadKeyFile:
            if not path.exists():
                raise
    return load(path)
