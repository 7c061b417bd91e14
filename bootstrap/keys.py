"""CURVE key pairs: made, kept in a file that only its owner reads, loaded.

Owns: the key file. Must not: decide who is trusted.

The file holds two lines, ``public = …`` and ``secret = …``, each key in Z85 (40 characters, ZeroMQ RFC 32).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import zmq


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
    """Write a new file with mode 0600. Raises BadKeyFile when there is one already."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BadKeyFile(f"{path} exists already; remove it first if its key is to be replaced") from None
    except OSError as error:
        raise BadKeyFile(f"{path}: {error.strerror}") from None
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(f"public = {keys.public}\nsecret = {keys.secret}\n")
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> KeyPair:
    """Read a key file. Raises BadKeyFile: missing, readable by others, or not a pair."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        raise BadKeyFile(f"{path} does not exist; make one with: pdxfer keygen {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadKeyFile(f"{path} cannot be read: {error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise BadKeyFile(f"{path} has mode {stat.S_IMODE(mode):04o}, expected 0600: others can read the secret; chmod 600 {path}")
    found = dict(
        (name.strip(), value.strip()) for name, _, value in (line.partition("=") for line in text.splitlines() if "=" in line)
    )
    # Z85 may hold '=' itself: take what stands behind the first one
    try:
        pair = KeyPair(found["public"], found["secret"])
        derived = zmq.curve_public(pair.secret.encode()).decode()
    except (KeyError, zmq.ZMQError, ValueError) as error:
        raise BadKeyFile(f"{path} is no key file ({type(error).__name__}: {error}); make one with: pdxfer keygen") from None
    if derived != pair.public:
        raise BadKeyFile(f"{path}: the public key does not belong to the secret one; make a new pair with: pdxfer keygen")
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
