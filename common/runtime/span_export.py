"""The export of spans: a bounded queue and a thread for each endpoint.

A queue that is full drops new spans, and an export that fails drops its batch; both are counted. So
an endpoint that does not answer costs spans of its own and nothing else.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from common.errors import InvalidRequest
from common.runtime.otlp import OtlpEndpoint

if TYPE_CHECKING:
    from grpc import ChannelCredentials

EXPORT_TIMEOUT_S = 1.0  # Per export.
QUEUE_SPANS_MAX = 4096  # Of one endpoint, with the batch that is being exported.
BATCH_SPANS_MAX = 512
BATCH_DELAY_S = 0.5


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """PEM files for https endpoints: authorities, certificate chain and key. None: not given."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class ExportQueue(SpanProcessor):
    """The spans of one endpoint that are not exported yet.

    - exported, dropped: spans so far.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter) -> None:
        """
        - endpoint: its URL, for metrics and logs.
        """
        self.endpoint = endpoint
        self._overflowed = 0
        self._accepted = 0
        self._exporter = _CountingExporter(exporter)
        self._batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUE_SPANS_MAX,
            schedule_delay_millis=BATCH_DELAY_S * 1000,
            max_export_batch_size=BATCH_SPANS_MAX,
        )

    @property
    def exported(self) -> int:
        return self._exporter.exported

    @property
    def dropped(self) -> int:
        return self._overflowed + self._exporter.failed

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        # Counted here: the processor of the SDK logs each span that it drops.
        exporter = self._exporter
        if self._accepted - exporter.exported - exporter.failed >= QUEUE_SPANS_MAX:
            self._overflowed += 1
            return
        self._accepted += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Exports what is queued; the SDK has no limit of time."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._batches.force_flush(timeout_millis)


class _CountingExporter(SpanExporter):
    """Counts the spans that another exporter has exported, and those of its failures."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        # Written by the thread of the exports.
        self.exported = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def open_queue(endpoint: OtlpEndpoint, files: ClientFiles) -> ExportQueue:
    """Returns the queue of an OTLP gRPC endpoint. Raises InvalidRequest if the files of an https
    endpoint cannot be used."""
    # Imported here: it loads a second gRPC stack, which tests and tools do not need.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(
        endpoint=endpoint.url,
        insecure=not endpoint.is_secure,
        credentials=_credentials(files) if endpoint.is_secure else None,
        # Without any, the SDK reads its variable, and sends what is there for another endpoint. It
        # warns of a blank text.
        headers=endpoint.headers or ",",
        timeout=EXPORT_TIMEOUT_S,
    )
    return ExportQueue(endpoint.url, exporter)


def _credentials(files: ClientFiles) -> ChannelCredentials | None:
    """Returns the credentials of these files; None without any: the SDK has variables too."""
    if files == ClientFiles():
        return None
    from grpc import ssl_channel_credentials

    ca = _read("otlp_ca_path", files.ca, lambda path: ssl.create_default_context(cafile=path))
    cert = _read("otlp_cert_path", files.cert)
    key = _read("otlp_key_path", files.key)
    if files.cert is not None and files.key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(files.cert, files.key)
        except OSError as error:  # ssl.SSLError is one.
            text = f"--otlp-cert-path {files.cert} and --otlp-key-path {files.key} do not fit"
            raise InvalidRequest(f"{text}: {error}", "otlp_cert_path") from error
    return ssl_channel_credentials(ca, key, cert)


def _read(
    setting: str, path: Path | None, check: Callable[[Path], object] = lambda path: None
) -> bytes | None:
    """Returns the contents of a file; None without a path. Raises InvalidRequest."""
    if path is None:
        return None
    try:
        content = path.read_bytes()
        check(path)
    except OSError as error:
        flag = "--" + setting.replace("_", "-")
        raise InvalidRequest(f"{flag}: cannot use {path}: {error}", setting) from error
    return content


def shut_down(queues: Sequence[ExportQueue], timeout_s: float) -> Sequence[str]:
    """Exports what is queued and stops, for all endpoints at once; returns those that did not take
    all spans within `timeout_s`."""
    threads = {
        queue.endpoint: threading.Thread(target=queue.shutdown, name="span-export-end", daemon=True)
        for queue in queues
    }
    deadline = time.monotonic() + timeout_s
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    return [endpoint for endpoint, thread in threads.items() if thread.is_alive()]
