"""A process that does what it is told, for the workers and for plain NIXL.

Owns: starting it, one order and one answer at a time, its errors, its end. Must not: know what is measured.

The process ends when its pipe closes, so however the bench ends, nothing stays behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from pdxfer.client import PdxferError
from pdxfer.core.reasons import Refused

Entry = Callable[..., None]  # called with the pipe and the arguments


class BenchError(Exception):
    """The measurement cannot go on; the message says what failed and where."""


class Failure:
    """An answer: it did not work."""

    def __init__(self, text: str) -> None:
        self.text = text


class Child:
    """One process."""

    def __init__(self, name: str, entry: Entry, *arguments: Any, environment: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of NIXL, ZeroMQ or a loop may be inherited
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(theirs, entry, arguments, dict(environment or {})), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    def tell(self, order: Any) -> None:
        self._pipe.send(order)

    def answer(self, timeout: float) -> Any:
        """Its next answer. Raises BenchError when it fails, dies, or takes longer."""
        try:
            if not self._pipe.poll(timeout):
                raise BenchError(f"{self.name} gave no answer within {timeout:g} s; it is pid {self._process.pid}")
            found = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(2.0)
            raise BenchError(f"{self.name} died: exit status {self._process.exitcode}") from None
        if isinstance(found, Failure):
            raise BenchError(f"{self.name}: {found.text}")
        return found

    def ask(self, order: Any, timeout: float) -> Any:
        self.tell(order)
        return self.answer(timeout)

    def close(self) -> None:
        """End it, whatever it is doing; a thread that waits for its answer gets a BenchError."""
        self._process.terminate()
        self._process.join(3.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def _run(pipe: Connection, entry: Entry, arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the bench, which then closes the pipe
    os.environ.update(environment)
    status = 0
    try:
        entry(pipe, *arguments)
    except (EOFError, ConnectionError):
        status = 0  # the bench is over
    except (BenchError, PdxferError, Refused) as error:
        status = 1
        pipe.send(Failure(str(error)))
    except Exception:  # noqa: BLE001 - a defect: told to the bench, which raises it there
        status = 1
        pipe.send(Failure(traceback.format_exc()))
    finally:
        os._exit(status)  # NIXL crashes in the interpreter's orderly exit
