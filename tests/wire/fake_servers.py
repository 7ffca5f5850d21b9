"""Servers that clients of 4.x should survive: one that answers as a test says, and a relay that cuts connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from librmq.errors import MalformedError
from librmq.runtime.locks import Lock
from librmq.wire.remoting._bodies import write_body
from librmq.wire.remoting._frames import Frame, FrameReader, answer_to, encode
from librmq.wire.remoting._headers import RequestCode

Answer = Callable[[Frame], "bytes | Frame | None"]


class _Listener:
    """A listening socket with a thread for each connection."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.connections = 0
        """Those that are open."""
        self.address = "{}:{}".format(*self._listening.getsockname())
        self._lock = Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self._listening.accept()
                with self._lock:
                    self._open.add(connected)
                    self.connections = len(self._open)
                threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with suppress(OSError, MalformedError):
            self.serve(connected)
        self._end(connected)

    def serve(self, connected: socket.socket) -> None:
        """Serve one connection until it ends."""
        raise NotImplementedError

    def _end(self, connected: socket.socket) -> None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)
        connected.close()
        with self._lock:
            self._open.discard(connected)
            self.connections = len(self._open)

    def cut(self) -> None:
        with self._lock:
            found = list(self._open)
        for connected in found:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeServer(_Listener):
    """A name server and broker named ``fake``, whose other answers a test gives: a frame, bytes or nothing."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Frame] = []
        super().__init__()
        self.broker: str | None = self.address
        """The address of the broker in routes; None as from a name server that has just started."""
        self.slaves: dict[int, str] = {}
        """Addresses of its slaves by broker id."""
        self.queues = 1
        """Queues of a topic in each broker."""
        self.others: dict[str, str] = {}
        """Addresses of other brokers, by name."""
        self.heartbeat_refusal: tuple[int, str] | tuple[()] = ()
        """Code and remark with which it refuses heartbeats."""

    def serve(self, connected: socket.socket) -> None:
        reader = FrameReader()
        while received := connected.recv(1 << 16):
            for frame in reader.feed(received):
                self.asked.append(frame)
                found = self._usual(frame) or self.answer(frame)
                if found is not None and not frame.is_one_way:
                    connected.sendall(found if isinstance(found, bytes) else encode(found))

    def _usual(self, frame: Frame) -> Frame | None:
        if frame.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return answer_to(frame, body=write_body({"brokerAddrTable": self._rows(), "clusterAddrTable": {}}))
        if frame.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            rows = self._rows()
            numbers = {"perm": 6, "readQueueNums": self.queues, "writeQueueNums": self.queues, "topicSysFlag": 0}
            queues = [{"brokerName": name, **numbers} for name in rows]
            return answer_to(frame, body=write_body({"brokerDatas": list(rows.values()), "queueDatas": queues}))
        if frame.code in (RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT):
            return answer_to(frame, *(self.heartbeat_refusal if frame.code == RequestCode.HEART_BEAT else ()))
        return None

    def _rows(self) -> dict[str, dict[str, object]]:
        master = {} if self.broker is None else {"0": self.broker}
        found = {"fake": master | {str(number): address for number, address in self.slaves.items()}}
        found |= {name: {"0": address} for name, address in self.others.items()}
        return {name: {"brokerAddrs": row, "brokerName": name, "cluster": "c"} for name, row in found.items() if row}


class Relay(_Listener):
    """Passes the bytes of each connection to a server, and back, until it is cut."""

    def __init__(self, port: Callable[[], int]) -> None:
        self._port = port
        super().__init__()

    def serve(self, connected: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._port())) as server:
            back = threading.Thread(target=self._pass, args=(server, connected), daemon=True)
            back.start()
            self._pass(connected, server)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while received := source.recv(1 << 16):
                target.sendall(received)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
