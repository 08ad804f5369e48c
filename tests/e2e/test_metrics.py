"""The metrics of running frontends after a success, a failure and a disconnect."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

LEGACY, CURRENT = "nv_llm_http_service_", "kvmesh_frontend_"
PATH = "/internal/metrics"
PATHS = {"both": "/metrics", "current": "/metrics", "legacy": PATH}
TOKENS = 5
_KIND = ("model", "endpoint", "request_type")

# By name: type, and labels without those of histograms.
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    f"{LEGACY}requests": ("counter", (*_KIND, "status")),
    f"{LEGACY}inflight_requests": ("gauge", ("model",)),
    f"{LEGACY}request_duration_seconds": ("histogram", ("model",)),
    f"{CURRENT}requests_started": ("counter", _KIND),
    f"{CURRENT}requests": ("counter", (*_KIND, "status", "error_type")),
    f"{CURRENT}failures": ("counter", ("model", "endpoint", "error_type")),
    f"{CURRENT}refused_bodies": ("counter", ("model", "endpoint", "code")),
    f"{CURRENT}disconnected_clients": ("counter", ("model",)),
    f"{CURRENT}output_tokens": ("counter", ("model",)),
    f"{CURRENT}inflight_requests": ("gauge", ("model",)),
    f"{CURRENT}queued_requests": ("gauge", ("model",)),
    **{
        CURRENT + name: ("histogram", ("model",))
        for name in (
            "request_duration_seconds",
            "input_sequence_tokens",
            "output_sequence_tokens",
            "cached_tokens",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
        )
    },
}
MODEL_SIZES = (
    *("workers", "total_kv_blocks", "max_num_seqs", "max_num_batched_tokens"),
    *("context_length", "block_size"),
)
# (endpoint, request type, status, error type) by model, of the requests of `Scrapes`.
REQUESTS = {
    (MODEL, "chat_completions", "unary", "success", ""): 1,
    (MODEL, "completions", "stream", "success", ""): 1,
    (MODEL, "chat_completions", "unary", "error", "validation"): 1,
    (MODEL, "completions", "stream", "error", "cancelled"): 1,
    ("other", "chat_completions", "unary", "error", "not_found"): 1,
}


@dataclass(frozen=True)
class Scrapes:
    """The families of each frontend by its setting. running: while a request ran."""

    mesh: Mesh
    frontends: Mapping[str, Service]
    running: Mapping[str, dict[str, Metric]]

    def ended(self, setting: str) -> dict[str, Metric]:
        """After all requests."""
        return scrape(self.mesh, self.frontends[setting], PATHS[setting])


def scrape(mesh: Mesh, frontend: Service, path: str) -> dict[str, Metric]:
    response = mesh.http.get(f"{frontend.addresses['http']}{path}")
    assert response.status_code == 200
    return {one.name: one for one in text_string_to_metric_families(response.text)}


def samples(family: Metric, suffix: str = "") -> dict[tuple[str, ...], float]:
    """The values of the samples with this suffix, by their label values in the order of names."""
    return {
        tuple(one.labels[name] for name in FAMILIES[family.name][1]): one.value
        for one in family.samples
        if one.name == family.name + suffix and "le" not in one.labels
    }


def chat(mesh: Mesh, url: str, **fields: Any) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
    return mesh.http.post(f"{url}/v1/chat/completions", json=body | fields).status_code


def begin_endless_stream(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    body = (
        b'{"model":"%b","prompt":"hi","max_tokens":2000,"ignore_eos":true,"stream":true}'
        % MODEL.encode()
    )
    client = socket.create_connection((host, int(port)), WAIT_S)
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    return client


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrapes]:
    folder = tmp_path_factory.mktemp("mesh")
    with Mesh(folder, workers=1, worker_flags=["--speedup=1"]) as mesh:
        both = mesh.frontend
        current = mesh.spawn("frontend", "--metrics-families=current")
        legacy = mesh.spawn("frontend", "--metrics-families=legacy", f"--metrics-path={PATH}")
        frontends = {"both": both, "current": current, "legacy": legacy}
        for frontend in frontends.values():
            if frontend is not both:
                frontend.wait_ready()
        wait_for(mesh.is_complete, "all frontends use the router and the worker")
        running = {}
        for name, frontend in frontends.items():
            url = frontend.addresses["http"]
            body = {"model": MODEL, "prompt": "hi", "max_tokens": TOKENS, "stream": True}
            assert chat(mesh, url, ignore_eos=True) == 200
            response = mesh.http.post(f"{url}/v1/completions", json=body | {"ignore_eos": True})
            assert response.text.endswith("data: [DONE]\n\n")
            assert chat(mesh, url, max_tokens=-1) == 400
            assert chat(mesh, url, model="absent") == 404
            with begin_endless_stream(url):
                running[name] = scrape(mesh, frontend, PATHS[name])

            def have_ended(frontend: Service = frontend) -> bool:
                return len(frontend.events("request")) == len(REQUESTS)

            wait_for(have_ended, "every request has a log line")
        yield Scrapes(mesh, frontends, running)


def has_prefixes(families: Mapping[str, Metric]) -> set[str]:
    return {prefix for prefix in (LEGACY, CURRENT) if f"{prefix}requests" in families}


@pytest.mark.row("S3-39")
def test_each_setting_exposes_its_families_of_request_metrics(scrapes: Scrapes) -> None:
    assert {name: has_prefixes(scrapes.ended(name)) for name in PATHS} == {
        "both": {LEGACY, CURRENT},
        "current": {CURRENT},
        "legacy": {LEGACY},
    }


@pytest.mark.row("S3-06", "S3-07", "S3-08", "S3-10")
@pytest.mark.parametrize("setting", ["both", "current", "legacy"])
def test_every_name_has_its_type_and_labels(scrapes: Scrapes, setting: str) -> None:
    found = scrapes.ended(setting)
    prefixes = tuple(has_prefixes(found))
    for name, (kind, labels) in FAMILIES.items():
        if name.startswith(prefixes):
            family = found[name]
            assert family.type == kind, name
            of_histogram = {"le"} if kind == "histogram" else set()
            names = {label for one in family.samples for label in one.labels}
            assert names == {*labels, *of_histogram}, name
        else:
            assert name not in found
    sizes = {name: found[f"{CURRENT}model_{name}"] for name in MODEL_SIZES}
    assert all(one.samples[0].value >= 1 for one in sizes.values())
    assert all(one.samples[0].labels == {"model": MODEL} for one in sizes.values())


@pytest.mark.row("S3-11", "S3-42", "S3-44", "S3-45")
@pytest.mark.parametrize("setting", ["both", "current", "legacy"])
def test_every_end_is_counted_with_its_labels(scrapes: Scrapes, setting: str) -> None:
    found = scrapes.ended(setting)
    if LEGACY in has_prefixes(found):
        by_status = {labels[:4]: count for labels, count in REQUESTS.items()}
        assert samples(found[f"{LEGACY}requests"], "_total") == by_status
    if CURRENT in has_prefixes(found):
        assert samples(found[f"{CURRENT}requests"], "_total") == REQUESTS
        started: dict[tuple[str, ...], int] = {}
        for labels, count in REQUESTS.items():
            started[labels[:3]] = started.get(labels[:3], 0) + count
        assert samples(found[f"{CURRENT}requests_started"], "_total") == started
        failures = {(a[0], a[1], a[4]): 1 for a in REQUESTS if a[3] == "error"}
        assert samples(found[f"{CURRENT}failures"], "_total") == failures
        refused = samples(found[f"{CURRENT}refused_bodies"], "_total")
        assert refused == {
            (MODEL, "chat_completions", "invalid_value"): 1,
            ("other", "chat_completions", "model_not_found"): 1,
        }
        assert samples(found[f"{CURRENT}disconnected_clients"], "_total")[(MODEL,)] == 1


@pytest.mark.row("S3-22", "S3-23")
@pytest.mark.parametrize("setting", ["both", "current", "legacy"])
def test_a_stream_that_ends_after_its_first_byte_without_success_is_an_error(
    scrapes: Scrapes, setting: str
) -> None:
    found = scrapes.ended(setting)
    for prefix in has_prefixes(found):
        counts = samples(found[f"{prefix}requests"], "_total")
        of_streams = {labels[3:]: n for labels, n in counts.items() if labels[2] == "stream"}
        cut = ("error",) if prefix == LEGACY else ("error", "cancelled")
        assert of_streams[cut] == 1
        assert sum(of_streams.values()) == 2


@pytest.mark.row("S3-13", "S3-14", "S3-41")
@pytest.mark.parametrize("setting", ["both", "current", "legacy"])
def test_a_gauge_counts_the_request_that_runs(scrapes: Scrapes, setting: str) -> None:
    ended = scrapes.ended(setting)
    for prefix in has_prefixes(ended):
        name = f"{prefix}inflight_requests"
        assert samples(scrapes.running[setting][name])[(MODEL,)] == 1
        assert samples(ended[name]) == {(MODEL,): 0, ("other",): 0}


@pytest.mark.row("S3-40")
def test_the_histograms_have_the_tokens_and_times_of_the_requests(scrapes: Scrapes) -> None:
    found = scrapes.ended("both")
    of_model = sum(count for labels, count in REQUESTS.items() if labels[0] == MODEL)
    for prefix in (LEGACY, CURRENT):
        durations = found[f"{prefix}request_duration_seconds"]
        assert samples(durations, "_count")[(MODEL,)] == of_model
        assert samples(durations, "_sum")[(MODEL,)] > 0
    # Two successes and the stream that was cut.
    for name in ("time_to_first_token_seconds", "output_sequence_tokens", "input_sequence_tokens"):
        assert samples(found[f"{CURRENT}{name}"], "_count")[(MODEL,)] == 3
    output = samples(found[f"{CURRENT}output_sequence_tokens"], "_sum")[(MODEL,)]
    assert output == samples(found[f"{CURRENT}output_tokens"], "_total")[(MODEL,)] > 2 * TOKENS
    gaps = samples(found[f"{CURRENT}inter_token_latency_seconds"], "_count")[(MODEL,)]
    assert gaps == output - 3


@pytest.mark.row("S3-33", "S3-34")
def test_the_document_has_the_path_of_the_metrics(scrapes: Scrapes) -> None:
    mesh = scrapes.mesh
    both, _, legacy = mesh.running("frontend")
    for frontend, path, other in ((both, "/metrics", PATH), (legacy, PATH, "/metrics")):
        url = frontend.addresses["http"]
        documented = mesh.http.get(f"{url}/openapi.json").json()["paths"]
        assert list(documented[path]) == ["get"]
        assert "text/plain" in documented[path]["get"]["responses"]["200"]["content"]
        assert other not in documented
        assert mesh.http.get(f"{url}{other}").status_code == 404


@pytest.mark.row("S3-29")
def test_a_log_line_has_the_labels_of_its_request(scrapes: Scrapes) -> None:
    lines = scrapes.mesh.frontend.events("request")
    kinds = {True: "stream", False: "unary"}
    logged = sorted((one["endpoint"], kinds[one["stream"]]) for one in lines if "stream" in one)
    counted = samples(scrapes.ended("both")[f"{CURRENT}requests"], "_total")
    assert logged == sorted(labels[1:3] for labels in counted if labels[4] != "validation")
