"""The node's voice to its peers, as the daemon uses it: the bootstrap thread under the supervisor, and the registry.

Owns: keys and directory, what goes to the registry and what comes from it, and the adapter to ``supervisor.Service``.
Must not: know rooms. Registry messages never reach the core; what they answer does, as Resolved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from .bootstrap import keys
from .bootstrap.directory import Directory
from .bootstrap.registry import Answer, Registry, Said
from .bootstrap.thread import Bootstrap, Refusals, Unstoppable
from .config import Config
from .core import messages
from .core.events import Event, PeerSaid, Resolved
from .supervisor import GiveUp, Phase

log = logging.getLogger(__name__)

ASK_INTERVAL: Final = 0.25  # seconds between repetitions to the registry
RELOADABLE: Final = ("bootstrap.authorized_keys", "registry.nodes")


class BootstrapService:
    """``deliver`` gets the events for the core, ``refused`` what was refused, ``died`` why the thread ended."""

    name = "bootstrap"

    def __init__(
        self,
        config: Config,
        incarnation: int,
        *,
        make_keys: bool,
        deliver: Callable[[Iterable[Event]], None],
        refused: Refusals,
        died: Callable[[str], None],
        attached: Callable[[], Iterable[str]],
    ) -> None:
        """``make_keys``: the key file is made if there is none. ``attached``: the engine ids that this node serves now.

        Raises keys.BadKeyFile.
        """
        path = Path(config.bootstrap.key_file)
        pair = keys.load_or_make(path) if make_keys else keys.load(path)
        self._node = config.node.name
        self._incarnation = incarnation
        self._deliver = deliver
        self._refused = refused
        self._attached = attached
        self._directory = Directory(self._node, pair.public)
        self._directory.configure(config.registry.nodes, config.bootstrap.authorized_keys)
        self._registry = Registry(config.registry, self._node, incarnation, pair.public)
        self._loop = asyncio.get_running_loop()
        self._thread = Bootstrap(
            self._node, config.bootstrap, pair, self._directory, self._loop, self._heard, refused, died,
            debug_hooks=config.debug.hooks,
        )  # fmt: skip
        self._embedded = config.registry.kind == "embedded"
        self._timer: asyncio.Handle | None = None
        self._condemned = False  # it hangs: taken for dead until it is replaced

    def start(self) -> None:
        """Bind. Raises OSError."""
        self._thread.start()
        if self._embedded:
            self._timer = self._loop.call_soon(self._ask_again)

    @property
    def address(self) -> str:
        return self._thread.address

    @property
    def dropped(self) -> int:
        """Frames that a peer was too slow or too dead for; everything in them is said again."""
        return self._thread.dropped

    def send(self, envelope: messages.Envelope) -> None:
        self._thread.send(envelope)

    def forget(self, node: str) -> None:
        self._thread.forget(node)

    def inject(self, fault: str) -> None:
        self._thread.inject(fault)

    def reload(self, config: Config) -> None:
        """Take over RELOADABLE."""
        self._directory.configure(config.registry.nodes, config.bootstrap.authorized_keys)
        self._registry.reload(config.registry)

    async def stop(self) -> None:
        """What waits to be sent, the goodbyes among it, has a moment to leave."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            await asyncio.to_thread(self._thread.stop)
        except Unstoppable as error:
            log.warning("%s: it ends with the process", error)
        self._thread.close()

    # under the supervisor ------------------------------------------------------------------------------------------

    def phase(self) -> Phase:
        return Phase.SERVING if self._thread.alive and not self._condemned else Phase.DOWN

    def heartbeat(self) -> int:
        return self._thread.heartbeat

    def kill(self, why: str) -> None:
        """Its end is waited for in ``restart``, so as not to hold up the main loop."""
        self._condemned = True

    async def restart(self) -> None:
        """In place: same port, same keys, same queues, no room lost. Raises GiveUp when only a new process helps."""
        try:
            await asyncio.to_thread(self._thread.restart)
        except Unstoppable as error:
            raise GiveUp(str(error)) from None
        self._condemned = False

    # the registry --------------------------------------------------------------------------------------------------

    def resolve(self, engine_id: str) -> None:
        """Answered by Resolved; if the registry is silent, the core's deadline answers."""
        answer, said = self._registry.resolve(engine_id, self._loop.time())
        self._say(said)
        if answer is not None:
            self._answer(answer)

    def attached_changed(self) -> None:
        """A worker came or went: the lease says so at once."""
        if self._embedded:
            self._renew()

    def problem(self) -> str | None:
        """Why the registry cannot be used, or None."""
        return self._registry.problem(self._loop.time())

    def _ask_again(self) -> None:
        self._renew()
        self._timer = self._loop.call_later(ASK_INTERVAL, self._ask_again)

    def _renew(self) -> None:
        engines = tuple(sorted(self._attached()))
        self._say(self._registry.due(engines, self.address, self._loop.time()))
        for answer in self._registry.settled(self._loop.time()):
            self._answer(answer)

    def _say(self, said: Iterable[Said]) -> None:
        for node, message in said:
            self._thread.send(messages.Envelope(messages.PROTOCOL, self._node, self._incarnation, node, 0, (message,)))

    def _answer(self, answer: Answer) -> None:
        if answer.node and answer.address:
            self._directory.learn(answer.node, answer.address, answer.public_key)
        if answer.engine_id:  # an introduction has none
            self._deliver([Resolved(answer.engine_id, answer.node, answer.incarnation, answer.error)])

    def _heard(self, batch: list[Event]) -> None:
        """From the thread: the registry's messages stay here, the rest is the core's."""
        rest: list[Event] = []
        for event in batch:
            if isinstance(event, PeerSaid):
                self._registry.heard(event.node, self._loop.time())
            if isinstance(event, PeerSaid) and any(isinstance(m, messages.RegistryMessage) for m in event.body):
                for message in event.body:
                    if isinstance(message, messages.RegistryMessage):
                        self._registry_said(event, message)
                body = tuple(m for m in event.body if not isinstance(m, messages.RegistryMessage))
                if body:
                    rest.append(PeerSaid(event.node, event.incarnation, event.to_incarnation, body))
            else:
                rest.append(event)
        self._deliver(rest)

    def _registry_said(self, event: PeerSaid, message: messages.RegistryMessage) -> None:
        if isinstance(message, messages.Announce):
            self._directory.learn(event.node, message.address)  # where its lookups are answered to
        try:
            answer, said = self._registry.on_message(
                event.node, event.incarnation, message, self._loop.time(), key=self._directory.key_of(event.node)
            )
        except ValueError as error:
            self._refused("peer", event.node, "bad_frame", str(error), 1)
            return
        self._say(said)
        if answer is not None:
            self._answer(answer)
