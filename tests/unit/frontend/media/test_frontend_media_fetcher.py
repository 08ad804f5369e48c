"""Which addresses media are fetched from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from common.errors import InvalidRequest
from frontend_svc.media.addresses import are_public
from frontend_svc.media.fetcher import CONNECTIONS_MAX, RESOLUTIONS_MAX, MediaFetcher
from tests.kit.waiting import until

PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450:4001::1"]
OTHERS = [
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254"),
    *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1"),
    *("192.168.0.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"),
    *("168.63.129.16", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::a00:1"),
    *("64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::1", "fc00::1"),
    *("fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1"),
]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert are_public([address])


@pytest.mark.parametrize("address", OTHERS)
def test_all_other_addresses_are_not_public_even_beside_a_public_one(address: str) -> None:
    assert not are_public([address])
    assert not are_public([PUBLIC[0], address])
    assert not are_public([])


async def test_a_name_is_resolved_once_and_the_checked_address_is_used() -> None:
    """A name that resolves to loopback at its second resolution (DNS rebinding) has no effect."""
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n" + PNG)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    questions: list[tuple[str, int]] = []
    answers = iter([["127.0.0.1"], ["127.0.0.1"], ["8.8.8.8", "127.0.0.1"]])

    async def resolve(host: str, port: int) -> Sequence[str]:
        questions.append((host, port))
        return next(answers)

    # An allowed name has any address; it is asked for once, and no other resolver is used.
    fetcher = MediaFetcher(hosts={f"media.invalid:{port}"}, timeout_s=5, resolve=resolve)
    url = f"http://media.invalid:{port}/a.png"
    assert await fetcher.fetch(url, 100, "x") == ("", PNG)
    assert (questions, connections) == ([("media.invalid", port)], 1)
    for host in ("other.invalid", "mixed.invalid"):
        with pytest.raises(InvalidRequest, match="not public") as raised:
            await fetcher.fetch(f"http://{host}/a.png", 100, "x")
        assert (raised.value.field, raised.value.reason) == ("x", "MEDIA_REFUSED")
    assert len(questions) == 3
    assert connections == 1
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "host",
    [
        *("a" * 64 + ".example", "a..example", ".example", "xn--a", "xn--\u00fc.example"),
        *("\u2024.example", "\u00ad", "xn--" + "a" * 60 + ".example", "a" * 300),
        *("\u0628a.example", "-\u00fc.example", "a%00b.example"),
    ],
)
async def test_a_host_that_is_no_valid_name_is_refused_with_the_field(host: str) -> None:
    fetcher = MediaFetcher(hosts=(), timeout_s=5)
    for url in (f"http://{host}/a.png", f"https://{host}:443/a.png"):
        with pytest.raises(InvalidRequest) as raised:
            await fetcher.fetch(url, 100, "messages[0].content[1].image_url")
        assert raised.value.field == "messages[0].content[1].image_url"
        assert raised.value.reason in ("MEDIA_REFUSED", "MEDIA_UNAVAILABLE")


Respond = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def site(respond: Respond) -> AsyncIterator[str]:
    """Serves on loopback; yields host and port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await respond(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_slow_urls_of_a_tenant_leave_connections_for_other_tenants() -> None:
    slow, released = 0, asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal slow
        if b"/slow" in await reader.readline():
            slow += 1
            await released.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n" + PNG)
        await writer.drain()

    async with site(respond) as host:
        fetcher = MediaFetcher(hosts={host}, timeout_s=20)
        slow_urls = [
            asyncio.create_task(fetcher.fetch(f"http://{host}/slow", 100, "x", "greedy"))
            for _ in range(2 * CONNECTIONS_MAX)
        ]
        await until(lambda: slow == CONNECTIONS_MAX // 2, "the tenant uses its share")
        for number in range(8):
            async with asyncio.timeout(5):
                found = await fetcher.fetch(f"http://{host}/fast", 100, "x", f"other-{number}")
            assert found == ("", PNG)
        assert slow == CONNECTIONS_MAX // 2
        released.set()
        assert [await task for task in slow_urls] == [("", PNG)] * len(slow_urls)


@pytest.mark.slow
async def test_slow_names_of_a_tenant_leave_resolutions_for_other_tenants() -> None:
    """A resolution cannot be cancelled: it counts until its thread is free."""
    running, released = 0, asyncio.Event()

    async def resolve(host: str, _: int) -> Sequence[str]:
        nonlocal running
        if host == "slow.invalid":
            running += 1
            await released.wait()
            running -= 1
        return ["127.0.0.1"]

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n" + PNG)
        await writer.drain()

    async with site(respond) as address:
        port = address.rpartition(":")[2]
        names = [f"{name}.invalid:{port}" for name in ("slow", "fast")]
        fetcher = MediaFetcher(hosts=names, timeout_s=1.5, resolve=resolve)
        for _ in range(2):
            urls = [fetcher.fetch(f"http://{names[0]}/", 100, "x", "greedy") for _ in range(20)]
            results = await asyncio.gather(*urls, return_exceptions=True)
            assert all(isinstance(result, InvalidRequest) for result in results)
            assert running == RESOLUTIONS_MAX // 2
            found = await fetcher.fetch(f"http://{names[1]}/", 100, "x", "other")
            assert found == ("", PNG)
        released.set()
        await until(lambda: not running, "the resolutions end")
        assert await fetcher.fetch(f"http://{names[0]}/", 100, "x", "greedy") == ("", PNG)


async def test_a_url_that_waits_for_the_share_of_its_tenant_has_the_time_limit() -> None:
    fetcher = MediaFetcher(hosts=(), timeout_s=0.1)
    async with contextlib.AsyncExitStack() as held:
        for _ in range(CONNECTIONS_MAX // 2):
            await held.enter_async_context(fetcher._slots.slot("greedy"))
        with pytest.raises(InvalidRequest, match=r"within 0\.1 s") as raised:
            await fetcher.fetch("http://other.invalid/", 100, "x", "greedy")
    assert (raised.value.field, raised.value.reason) == ("x", "MEDIA_UNAVAILABLE")
