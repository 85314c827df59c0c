"""Whether two ranks reach each other, and how fast: plain TCP, whatever backend the groups use."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlightning_groups.layout import ParallelLayout

_ALL_PAIRS = 8  # in a group of at most this many ranks, everyone probes everyone
_HUB = 256  # in a group of at most this many, everyone probes the first rank
_STEPS = (1, 2)  # in a larger one, these steps along the ring, both ways
_BACKLOG = 1024
_QUIET_SECONDS = 0.5
_PING = b"a ping.."
_SIOCGIFADDR = 0x8915
_SOMEWHERE = "203.0.113.1"  # kept for documentation: nobody has this address, and nothing is sent there


@dataclass(frozen=True)
class Address:
    """Where a rank listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Contact:
    """What a rank found out about a peer.

    Attributes:
        peer: the peer's world rank.
        connect: seconds until the connection stood, ``None`` where it did not.
        round_trip: median of the pings in seconds, ``None`` where there was an error or no time left.
        error: why the peer could not be reached.
    """

    peer: int
    connect: float | None = None
    round_trip: float | None = None
    error: str | None = None


def do_nothing(stage: str) -> None:
    """The default of what is done before a stage's work; tests put their faults in its place.

    Args:
        stage: ``"answer"``, ``"probe"`` or ``"collective"``.
    """


def peers_of(layout: ParallelLayout, rank: int) -> list[int]:
    """The ranks that a rank probes: those of its groups, and of large groups a few.

    The number grows with the number of groups, not with the world.

    Args:
        layout: who sits where.
        rank: world rank.

    Returns:
        World ranks, the next ones first, so that not all ranks begin with the same peer.
    """
    peers: set[int] = set()
    for ranks in {tuple(layout.ranks_in_group(mode, rank)) for mode in layout.modes}:
        size, place = len(ranks), ranks.index(rank)
        if size <= _ALL_PAIRS:
            peers.update(ranks)
            continue
        peers.update(ranks[(place + step * way) % size] for step in _STEPS for way in (1, -1))
        if size <= _HUB:
            peers.add(ranks[0])
    return sorted(peers - {rank}, key=lambda peer: (peer - rank) % layout.world_size)


def own_host(backend: str, several_nodes: bool) -> str:
    """The address of this host that its peers use.

    It is that of the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME where one is set, else the one
    from which MASTER_ADDR is reached.

    Args:
        backend: torch backend of the groups.
        several_nodes: whether a loopback address would be of no use to some peers.

    Raises:
        OSError: there is no such interface, or no way to MASTER_ADDR.
    """
    variables = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    for variable in reversed(variables) if "nccl" in backend else variables:
        if wanted := os.environ.get(variable):
            there = [name for _, name in socket.if_nameindex()]
            hosts = [_host_of(name) for name in _chosen(wanted, there, "NCCL" in variable)]
            if host := next(filter(None, hosts), None):
                return host
            raise OSError(
                f"{variable}={wanted} is no interface with an address; there are {', '.join(there)}"
            )
    host = _host_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if several_nodes and ipaddress.ip_address(host).is_loopback:
        # The host's own name often stands for a loopback address in its /etc/hosts.
        try:
            host = _host_towards(_SOMEWHERE)
        except OSError:
            found = (_host_of(name) for _, name in socket.if_nameindex())
            host = next((one for one in found if one and not ipaddress.ip_address(one).is_loopback), host)
    return host


def _chosen(wanted: str, there: Iterable[str], by_prefix: bool) -> list[str]:
    """The interfaces that a variable's value stands for: gloo lists names, NCCL prefixes with signs."""
    if not by_prefix:
        return [name for name in wanted.split(",") if name in there]
    without = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    parts = tuple(part for part in wanted.lstrip("^=").split(",") if part)
    hits = [name for name in there if (name in parts if exact else name.startswith(parts))]
    return [name for name in there if name not in hits and name != "lo"] if without else hits


def _host_of(interface: str) -> str | None:
    """An interface's address, IPv4 first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # it has none, but may have the other kind
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    found = [
        ipaddress.IPv6Address(int(line.split()[0], 16)) for line in lines if line.split()[-1] == interface
    ]
    return next((str(address) for address in found if not address.is_link_local), None)


def _host_towards(target: str) -> str:
    """The address that this host would send from; a UDP socket finds out and sends nothing."""
    family, kind, protocol, _, there = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(there)
        return str(asking.getsockname()[0])


class Answerer:
    """Answers the pings of other ranks in a thread, until it is closed.

    Args:
        host: where to listen.
        rank: world rank of this process, which callers are greeted with.
        before: called with ``"answer"`` before each answer.

    Attributes:
        address: where it listens.
    """

    def __init__(self, host: str, rank: int, before: Callable[[str], None] = do_nothing) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address = Address(host, self._listener.getsockname()[1])
        self._rank, self._before = rank, before
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="answer pings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no longer."""
        self._stop.close()
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stopped, selectors.EVENT_READ)
            going = True
            while going:
                for key, _ in selector.select():
                    caller = key.fileobj
                    assert isinstance(caller, socket.socket)
                    if caller is self._stopped:
                        going = False
                    elif caller is self._listener:
                        self._greet(selector)
                    elif not self._answer(caller):
                        selector.unregister(caller)
                        caller.close()
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()

    def _greet(self, selector: selectors.BaseSelector) -> None:
        try:
            caller, _ = self._listener.accept()
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.setblocking(False)
            caller.send(struct.pack("!i", self._rank))
        except OSError:  # gone again
            return
        selector.register(caller, selectors.EVENT_READ)

    def _answer(self, caller: socket.socket) -> bool:
        """Send back what came; false once the caller has gone."""
        try:
            if not (data := caller.recv(4096)):
                return False
            self._before("answer")
            caller.send(data)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def probe(addresses: Mapping[int, Address], repeat: int, timeout: float) -> list[Contact]:
    """Connect to every peer at once, then ping those that answer one after another.

    Args:
        addresses: where the peers listen, by world rank, in the order to ping them.
        repeat: number of pings, of which the median counts.
        timeout: seconds after which a peer that has not answered counts as one that cannot be reached.

    Returns:
        What was found out about each peer.
    """
    deadline = time.monotonic() + timeout
    calls = {peer: _Call(peer, address) for peer, address in addresses.items()}
    answered: list[_Call] = []
    done: list[Contact] = []
    with selectors.DefaultSelector() as selector:
        for call in calls.values():
            call.start(selector)
        waiting = [call for call in calls.values() if call.error is None]
        while waiting and (left := deadline - time.monotonic()) > 0:
            events = selector.select(min(left, _QUIET_SECONDS) if answered else left)
            for key, _ in events:
                key.data.go_on(selector)
            answered += [call for call in waiting if call.greeted]
            waiting = [call for call in waiting if not call.greeted and call.error is None]
            if not events:  # so that the pings of some do not stand in the way of the connecting of others
                done += _ping_all(answered, repeat, deadline)
                answered = []
        done += _ping_all(answered, repeat, deadline)
        for call in waiting:
            how = "no connection" if call.connect is None else "a connection, but no answer"
            call.error = f"{how} within {timeout:g} s"
        done += [call.result() for call in calls.values() if call.error is not None]
        for call in calls.values():
            call.socket.close()
    by_peer = {contact.peer: contact for contact in done}
    return [by_peer[peer] for peer in addresses]


class _Call:
    """One connection to a peer on its way to standing."""

    def __init__(self, peer: int, address: Address) -> None:
        self.peer = peer
        self.address = address
        self.socket = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        self.connect: float | None = None
        self.error: str | None = None
        self.greeted = False
        self._begin = 0.0
        self._greeting = b""

    def start(self, selector: selectors.BaseSelector) -> None:
        self.socket.setblocking(False)
        self._begin = time.monotonic()
        code = self.socket.connect_ex((self.address.host, self.address.port))
        if code not in (0, errno.EINPROGRESS):
            self.error = os.strerror(code).lower()
            return
        selector.register(self.socket, selectors.EVENT_WRITE, self)

    def go_on(self, selector: selectors.BaseSelector) -> None:
        """Take the next step: connected, then greeted; or failed."""
        if self.connect is None:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._fail(os.strerror(code).lower(), selector)
                return
            self.connect = time.monotonic() - self._begin
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.modify(self.socket, selectors.EVENT_READ, self)
            return
        try:
            self._greeting += (part := self.socket.recv(4 - len(self._greeting)))
        except OSError as error:
            self._fail(f"a connection, but then {os.strerror(error.errno or 0).lower()}", selector)
            return
        if not part:
            self._fail("a connection, but it was closed before an answer", selector)
        elif len(self._greeting) == 4:
            selector.unregister(self.socket)
            (rank,) = struct.unpack("!i", self._greeting)
            self.greeted = rank == self.peer
            if not self.greeted:
                self.error = "another process answers there"

    def ping(self, repeat: int, enough: float, deadline: float) -> Contact:
        """The median time of a round trip, the first one being left out.

        Args:
            repeat: number of pings.
            enough: when to be content with fewer.
            deadline: when to wait no longer for an answer.
        """
        seconds: list[float] = []
        try:
            while len(seconds) <= repeat and not (seconds and time.monotonic() > enough):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self.socket.settimeout(left)
                begin = time.perf_counter()
                self.socket.sendall(_PING)
                answer = b""
                while len(answer) < len(_PING):
                    if not (part := self.socket.recv(len(_PING) - len(answer))):
                        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                    answer += part
                seconds.append(time.perf_counter() - begin)
        except TimeoutError:
            self.error = "a connection, but no answer any more"
        except OSError as error:
            self.error = f"a connection, but then {os.strerror(error.errno or 0).lower()}"
        if self.error is not None or not seconds:
            return self.result()
        return Contact(self.peer, self.connect, statistics.median(seconds[1:] or seconds))

    def result(self) -> Contact:
        return Contact(self.peer, self.connect, None, self.error)

    def _fail(self, error: str, selector: selectors.BaseSelector) -> None:
        selector.unregister(self.socket)
        self.error = error


def _ping_all(calls: Sequence[_Call], repeat: int, deadline: float) -> list[Contact]:
    """Ping one after another, in equal shares of the time that is left."""
    contacts = []
    for index, call in enumerate(calls):
        now = time.monotonic()
        contacts.append(call.ping(repeat, now + (deadline - now) / 2 / (len(calls) - index), deadline))
    return contacts
