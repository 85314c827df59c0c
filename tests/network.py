"""Hosts that are network namespaces, joined by a switch that can delay and drop what passes.

The switch is a process, because the kernel's own delay (``tc netem``) is missing in many builds.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import multiprocessing
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from pool import start_fork_server

CLONE_NEWNET = 0x40000000
SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x19, 0x24)  # checksums, scatter-gather and segmentation, which the switch cannot do
PACKET_IGNORE_OUTGOING = 23
SOL_PACKET = 263
ETH_P_ALL, ETH_P_IP = 3, 0x0800
SYN, ACK = 0x02, 0x10


class NoNamespacesError(Exception):
    """This machine cannot play several hosts; the message says why."""


def enter(namespace: str) -> None:
    """Move this process, which must not have threads yet, to a network namespace."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(file)


@dataclass(frozen=True)
class Network:
    """Hosts of which each has an ``eth0`` that leads to a namespace for the switch."""

    prefix: str
    count: int

    @property
    def middle(self) -> str:
        return f"{self.prefix}-switch"

    def host(self, index: int) -> str:
        return f"{self.prefix}-{index}"

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def mac(self, index: int) -> str:
        return f"02:00:00:00:77:{index + 1:02x}"

    @property
    def names(self) -> list[str]:
        return [self.middle, *map(self.host, range(self.count))]

    def left(self) -> list[str]:
        """Its namespaces that are there."""
        return [name for name in self.names if Path("/run/netns", name).exists()]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Network]:
    """Namespaces that are there for a while.

    Raises:
        NoNamespacesError: they cannot be made here.
    """
    network = Network(f"rlg{os.getpid()}", count)
    try:
        try:
            for name in network.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            for index in range(count):
                name = network.host(index)
                ends = ["link", "add", f"port{index}", "type", "veth", "peer", "name", "eth0"]
                ip("-n", network.middle, *ends, "netns", name)
                ip("-n", network.middle, "link", "set", f"port{index}", "up")
                ip("-n", name, "link", "set", "eth0", "address", network.mac(index))
                ip("-n", name, "addr", "add", f"{network.address(index)}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            told = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
            raise NoNamespacesError(f"network namespaces cannot be made here: {str(told).strip()}") from error
        yield network
    finally:
        for name in network.names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, text=True)


@contextlib.contextmanager
def switch(
    network: Network,
    delays: Mapping[int, float] | None = None,
    cut: Collection[tuple[int, int]] = (),
    closed: Collection[int] = (),
) -> Iterator[None]:
    """Carry frames between the hosts.

    Args:
        network: the hosts.
        delays: how many seconds later what a host sends arrives.
        cut: pairs of hosts between which no IP packet passes.
        closed: hosts to which nobody can open a TCP connection.
    """
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_carry, args=(theirs, network, dict(delays or {}), set(cut), set(closed))
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(20) or ours.recv() != "ready":
            raise RuntimeError("the switch did not start")
        yield
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _opens_connection(frame: bytes) -> bool:
    """Whether an IPv4 packet is the first one of a TCP connection."""
    flags = 14 + 4 * (frame[14] & 15) + 13
    return frame[23] == socket.IPPROTO_TCP and frame[flags] & (SYN | ACK) == SYN


def _carry(
    connection: Connection,
    network: Network,
    delays: Mapping[int, float],
    cut: Collection[tuple[int, int]],
    closed: Collection[int],
) -> None:
    for index in range(network.count):
        enter(network.host(index))
        _switch_offloads_off()
    enter(network.middle)
    ports = []
    for index in range(network.count):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        port.bind((f"port{index}", 0))
        ports.append(port)
    by_mac = {bytes.fromhex(network.mac(index).replace(":", "")): index for index in range(network.count)}
    connection.send("ready")
    late: list[tuple[float, int, int, bytes]] = []  # when, a number that keeps the order, whereto, what
    number = 0
    while True:
        pause = max(0.0, late[0][0] - time.monotonic()) if late else None
        for port in select.select([*ports, connection], [], [], pause)[0]:
            if port is connection:  # the test is gone
                return
            sender, frame = ports.index(port), port.recv(65536)
            kind = struct.unpack_from("!H", frame, 12)[0]
            known = by_mac.get(frame[:6])
            for receiver in range(network.count) if known is None else [known]:
                is_cut = (sender, receiver) in cut or (receiver, sender) in cut
                is_shut = receiver in closed and kind == ETH_P_IP and _opens_connection(frame)
                if receiver == sender or is_shut or (is_cut and kind == ETH_P_IP):
                    continue
                number += 1
                heapq.heappush(late, (time.monotonic() + delays.get(sender, 0.0), number, receiver, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, receiver, frame = heapq.heappop(late)
            with contextlib.suppress(OSError):
                ports[receiver].send(frame)


def _switch_offloads_off() -> None:
    libc = ctypes.CDLL(None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", b"eth0", ctypes.addressof(value)).ljust(40, b"\0")
            libc.ioctl(asking.fileno(), SIOCETHTOOL, request)
