"""An engine's publisher of KV events in a process of its own, which a test can kill.

It reads commands from stdin, one a line, and prints `done` after each:
- `subscribed` waits until the subscription of a reader takes effect.
- `publish FIRST COUNT` publishes COUNT batches. Batch n stores one block of BLOCK tokens, each
  FIRST + n, with this number as hash.
- `flush` passes all published batches to the operating system. It publishes nothing afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import zmq

BLOCK = 4
TOPIC = b"kv-events"


def main(port: int, replay_port: int) -> None:
    """Publishes at `port` and serves replays at `replay_port`; 0: there is no replay service."""
    context = zmq.Context()
    # Unlike PUB, XPUB receives the subscriptions.
    live = context.socket(zmq.XPUB)
    live.set(zmq.SNDHWM, 0)
    live.bind(f"tcp://127.0.0.1:{port}")
    kept: list[bytes] = []
    if replay_port:
        threading.Thread(target=serve_replays, args=(replay_port, kept), daemon=True).start()
    print("done", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["subscribed"]:
                # Ends: a reader subscribes; the test kills this process.
                while live.recv() != b"\x01" + TOPIC:
                    pass
            case ["publish", first, count]:
                for payload in batches(int(first), int(count)):
                    live.send_multipart([TOPIC, len(kept).to_bytes(8, "big"), payload])
                    kept.append(payload)
            case ["flush"]:
                live.close(linger=-1)
                context.term()
        print("done", flush=True)


def batches(first: int, count: int) -> Iterator[bytes]:
    for number in range(first, first + count):
        event = {
            "type": "BlockStored",
            "block_hashes": [number],
            "parent_block_hash": None,
            "token_ids": [number] * BLOCK,
            "block_size": BLOCK,
        }
        yield msgspec.msgpack.encode([0.0, [event], 0])


def serve_replays(port: int, kept: list[bytes]) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    while True:
        client, _, first = router.recv_multipart()
        for number, payload in enumerate(tuple(kept)):
            if number >= int.from_bytes(first, "big"):
                router.send_multipart([client, b"", TOPIC, number.to_bytes(8, "big"), payload])
        end = (-1).to_bytes(8, "big", signed=True)
        router.send_multipart([client, b"", b"", end, b""])


class EngineProcess:
    """The process on fixed ports. All methods block, and so does the loop that calls them."""

    def __init__(self, port: int, replay_port: int | None) -> None:
        self._command = [sys.executable, "-m", __name__, str(port), str(replay_port or 0)]
        self.start()

    def start(self) -> None:
        """Starts the process, with an empty cache and sequence number 0."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        self._wait_done()

    def run(self, *words: object) -> None:
        """Runs one command to its end."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        self._wait_done()

    def kill(self) -> None:
        """Kills the process. Batches since the last `flush` may be lost. Idempotent."""
        self._process.kill()
        self._process.communicate()

    def _wait_done(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n", "the engine process failed"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
