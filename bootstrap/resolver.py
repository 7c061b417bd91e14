"""Host names of peers, resolved outside of every thread that others wait for.

Owns: the answers and the threads that fetch them. Must not: know sockets. ZeroMQ would resolve a name in the one thread
that moves the bytes of all peers, where a name server that does not answer delays everybody; so it is given numbers only.

A thread exists only while names are being resolved, and none of them holds anything that is needed again.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from .settings import split_endpoint

MAX_THREADS: Final = 8
FRESH: Final = 30.0  # seconds that an answer is used without asking again
PAUSE: Final = 2.0  # seconds between two questions for the same name


class _Answer(NamedTuple):
    asked: float
    hosts: tuple[str, ...]  # numbers, an IPv6 one in brackets; empty: the name is not known


class Resolver:
    """``ready`` is called with a host name, in a thread of the resolver's, when its answer is there.

    With what went wrong, too, the first time that it does.
    """

    def __init__(self, ready: Callable[[str, str], None]) -> None:
        self._ready = ready
        self._lock = threading.Lock()
        self._answers: dict[str, _Answer] = {}
        self._asking: set[str] = set()
        self._failing: set[str] = set()
        self._queue: deque[tuple[str, float]] = deque()
        self._threads = 0

    def endpoints(self, address: str, now: float, *, again: bool = False) -> tuple[str, ...]:
        """The address with numbers for its host, as many as the name has; empty while they are not known.

        ``again``: the numbers do not work, so ask for new ones soon.
        """
        parts = split_endpoint(address)
        if parts is None:
            return ()
        host, port = parts
        if host.startswith("[") or _is_number(host):
            return (address,)
        with self._lock:
            known = self._answers.get(host)
            age = now - known.asked if known is not None else float("inf")
            if age > (PAUSE if again or known is None or not known.hosts else FRESH):
                self._ask(host, now)
        return tuple(f"tcp://{number}:{port}" for number in known.hosts) if known is not None else ()

    def _ask(self, host: str, now: float) -> None:
        if host in self._asking:
            return
        self._asking.add(host)
        self._queue.append((host, now))
        if self._threads < MAX_THREADS:
            self._threads += 1
            threading.Thread(target=self._work, name="pdxfer-resolver", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                host, now = self._queue.popleft()
            hosts, trouble = _resolve(host)
            with self._lock:
                if not trouble:
                    self._failing.discard(host)
                elif host in self._failing:
                    trouble = ""
                else:
                    self._failing.add(host)
                old = self._answers.get(host)
                if not hosts and old is not None:
                    hosts = old.hosts  # a name server that is down takes nobody's address away
                self._answers[host] = _Answer(now, hosts)
                self._asking.discard(host)
            self._ready(host, trouble)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _resolve(host: str) -> tuple[tuple[str, ...], str]:
    """Numbers, or what went wrong."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), str(error)
    numbers = dict.fromkeys(str(place[0]) for *_, place in found)
    return tuple(f"[{number}]" if ":" in number else number for number in numbers), ""
