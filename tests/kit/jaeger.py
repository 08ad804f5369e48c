"""The query API of Jaeger over spans that an OTLP receiver has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

# Any: JSON.
from typing import Any
from urllib.parse import parse_qs, urlsplit

from common.runtime.telemetry import STABLE_NAME
from meshctl.commands.demo import ReceivedSpan

Json = dict[str, Any]


@contextmanager
def jaeger(spans: Callable[[], Sequence[ReceivedSpan]]) -> Iterator[str]:
    """Yields the URL of the API. spans: called at each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            found = _find(spans(), url.path, parse_qs(url.query))
            body = json.dumps({"data": found}).encode()
            self.send_response(200 if found or url.query else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _find(
    spans: Sequence[ReceivedSpan], path: str, query: Mapping[str, Sequence[str]]
) -> list[Json]:
    trace_id = path.removeprefix("/api/traces").strip("/")
    if not trace_id:
        assert int(query["start"][0]) < int(query["end"][0])
        tags = json.loads(query["tags"][0])
        of_service = [span for span in spans if span.service == query["service"][0]]
        for span in of_service:
            if all(span.attribute(name) == value for name, value in tags.items()):
                trace_id = span.span.trace_id.hex()
    of_trace = [span for span in spans if span.span.trace_id.hex() == trace_id]
    if not of_trace:
        return []
    processes = {
        f"p{n}": {
            "serviceName": span.service,
            "tags": [{"key": STABLE_NAME, "value": span.stable_name}],
        }
        for n, span in enumerate(of_trace)
    }
    return [
        {
            "traceID": trace_id,
            "processes": processes,
            "spans": [_span(f"p{n}", span) for n, span in enumerate(of_trace)],
        }
    ]


def _span(process_id: str, received: ReceivedSpan) -> Json:
    span = received.span
    references = []
    if span.parent_span_id:
        references.append({"refType": "CHILD_OF", "spanID": span.parent_span_id.hex()})
    references += [{"refType": "FOLLOWS_FROM", "spanID": link.span_id.hex()} for link in span.links]
    return {
        "spanID": received.span_id,
        "operationName": span.name,
        "startTime": span.start_time_unix_nano // 1000,
        "duration": (span.end_time_unix_nano - span.start_time_unix_nano) // 1000,
        "processID": process_id,
        "references": references,
        "tags": [{"key": a.key, "value": received.attribute(a.key)} for a in span.attributes],
    }
