"""Network namespaces for the sidecars, with links that can be cut.

Owns: one bridge in a namespace of its own, a namespace for each node, the links between them and the administration's, and
the cuts. Must not: start processes; it wraps command lines.

Each node has two links: "data0", to the other nodes, which is cut; and "adm0", to this process, which is not. A one-way cut
is a permanent neighbour entry that nobody has: works in every kernel. Delay and loss need netem, which many lack.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NODES = ("p", "d", "b")
PROBES = 50
NOBODY = "02:00:00:00:00:99"


class NetworkError(Exception):
    """A command failed; the message has what it said."""


def missing() -> str:
    """Why there can be no namespaces here; "" when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (Debian, Ubuntu: apt-get install iproute2)"
    name = f"pdxprobe{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except NetworkError as error:
        return str(error)
    return ""


def netem() -> bool:
    """Has this kernel netem?"""
    name = f"pdxprobe{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        finally:
            _run("ip", "netns", "del", name)
    except NetworkError:
        return False
    return True


class Network:
    """Namespaces for p, d and b."""

    device = "data0"

    def __init__(self, tag: str) -> None:
        self.tag = tag.replace("_", "0").replace("-", "0")
        self._octet = 100 + os.getpid() % 100

    def namespace(self, node: str) -> str:
        return f"pdx-{self.tag}-{node}"

    def address(self, node: str) -> str:
        return f"10.{self._octet}.0.{NODES.index(node) + 1}"

    def admin(self, node: str) -> str:
        return f"10.{self._octet}.{NODES.index(node) + 1}.2"

    def within(self, node: str, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(node), *argv]

    def up(self) -> None:
        """Raises NetworkError."""
        middle = self.namespace("m")
        _run("ip", "netns", "add", middle)
        _run("ip", "-n", middle, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", middle, "link", "set", "br0", "up")
        for number, node in enumerate(NODES, 1):
            own = self.namespace(node)
            _run("ip", "netns", "add", own)
            _run("ip", "-n", own, "link", "set", "lo", "up")
            _run(
                "ip",
                "-n",
                own,
                "link",
                "add",
                "data0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{number}",
                "netns",
                middle,
            )
            _run("ip", "-n", middle, "link", "set", f"port{number}", "master", "br0", "up")
            _run("ip", "-n", own, "addr", "add", f"{self.address(node)}/24", "dev", "data0")
            _run("ip", "-n", own, "link", "set", "data0", "up")
            outer = self._outer(node)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "adm0", "netns", own)
            _run("ip", "addr", "add", f"10.{self._octet}.{number}.1/24", "dev", outer)
            _run("ip", "link", "set", outer, "up")
            _run("ip", "-n", own, "addr", "add", f"{self.admin(node)}/24", "dev", "adm0")
            _run("ip", "-n", own, "link", "set", "adm0", "up")

    def down(self) -> None:
        for node in (*NODES, "m"):
            if node != "m":
                subprocess.run(["ip", "link", "del", self._outer(node)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self.namespace(node)], capture_output=True, check=False)

    def _outer(self, node: str) -> str:
        return f"pdx{self.tag[:8]}{node}"

    def cut(self, source: str, target: str) -> None:
        """No packet from ``source`` reaches ``target`` any more."""
        neighbour = ("neigh", "replace", self.address(target), "lladdr", NOBODY, "dev", "data0", "nud", "permanent")
        _run("ip", "-n", self.namespace(source), *neighbour)

    def heal(self, source: str, target: str) -> None:
        _run("ip", "-n", self.namespace(source), "neigh", "del", self.address(target), "dev", "data0")

    def shape(self, node: str, *qdisc: str) -> None:
        """A queueing discipline on what leaves a node."""
        _run("tc", "-n", self.namespace(node), "qdisc", "replace", "dev", "data0", "root", *qdisc)

    def unshape(self, node: str) -> None:
        _run("tc", "-n", self.namespace(node), "qdisc", "del", "dev", "data0", "root")

    def qdisc(self, node: str) -> str:
        return _run("tc", "-n", self.namespace(node), "-s", "qdisc", "show", "dev", "data0")

    def passes(self, source: str, target: str) -> bool:
        """Does a datagram get from one to the other? By the target's count of datagrams to a port where nobody listens."""
        before = self._unwanted(target)
        code = (
            "import socket,sys\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\n"
            f"for _ in range({PROBES}): s.sendto(b'chaos',(sys.argv[1],9))"
        )
        _run("ip", "netns", "exec", self.namespace(source), sys.executable, "-c", code, self.address(target))
        return self._unwanted(target) - before >= PROBES // 2

    def _unwanted(self, node: str) -> int:
        text = _run("ip", "netns", "exec", self.namespace(node), "cat", "/proc/net/snmp")
        names, values = (line.split() for line in text.splitlines() if line.startswith("Udp:"))
        return int(values[names.index("NoPorts")])


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise NetworkError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()[:300]}")
    return done.stdout
