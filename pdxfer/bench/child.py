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
from pdxfer.engine.main import die_with

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

    @property
    def state(self) -> str:
        """For the error of somebody who talks to it."""
        if self._process.is_alive():
            return f"{self.name} lives, pid {self._process.pid}"
        return f"{self.name} died: {_status(self._process.exitcode)}"

    def tell(self, order: Any) -> None:
        """Raises BenchError when it is dead, with its last words if it had any."""
        try:
            self._pipe.send(order)
        except OSError:
            self.answer(2.0)
            raise BenchError(f"{self.name} takes no order") from None

    def answer(self, timeout: float) -> Any:
        """Its next answer. Raises BenchError when it fails, dies, or takes longer."""
        try:
            if not self._pipe.poll(timeout):
                raise BenchError(f"{self.name} gave no answer within {timeout:g} s; it is pid {self._process.pid}")
            found = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(2.0)
            raise BenchError(f"{self.name} died: {_status(self._process.exitcode)}") from None
        if isinstance(found, Failure):
            raise BenchError(f"{self.name}: {found.text}")
        return found

    def pause(self) -> None:
        """Stop it where it is, so that it takes nothing of a core."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        if self._process.is_alive():  # its end is told by whoever asks it next
            os.kill(self._process.pid, number)

    def ask(self, order: Any, timeout: float) -> Any:
        self.tell(order)
        return self.answer(timeout)

    def close(self) -> None:
        """End it, whatever it is doing; a thread that waits for its answer gets a BenchError."""
        self._process.terminate()
        self.resume()  # one that is stopped takes no signal but this
        self._process.join(3.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def _run(pipe: Connection, entry: Entry, arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    die_with(parent.pid)  # also one that is stopped, and could not see its pipe close
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
    except Exception as error:  # noqa: BLE001 - of the host, or a defect: told to the bench, which raises it there
        status = 1
        if os.environ.get("PDXFER_LOG_LEVEL") == "debug":
            traceback.print_exc()
        pipe.send(Failure(_words(error)))
    finally:
        os._exit(status)  # NIXL crashes in the interpreter's orderly exit


def _words(error: Exception) -> str:
    """One line: what, and where in our code. The traceback is for PDXFER_LOG_LEVEL=debug."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is _run's
    ours = [f for f in frames if f"{os.sep}pdxfer{os.sep}bench{os.sep}" in f.filename] or frames
    where = f" (at {os.path.basename(ours[-1].filename)}:{ours[-1].lineno})" if ours else ""
    return (
        f"{type(error).__name__}: {' '.join(str(error).split()) or 'it says no more'}{where};"
        " PDXFER_LOG_LEVEL=debug shows the traceback"
    )


def _status(code: int | None) -> str:
    if code is None:
        return "its exit status is not known"
    if code < 0:
        return f"signal {-code}; 9 may be the kernel short of memory, 11 a crash in native code"
    return f"exit status {code}"
