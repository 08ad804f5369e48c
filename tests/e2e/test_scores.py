"""Rerank and score at the door: order, scores, usage, limits, refusals, lost workers."""

from __future__ import annotations

from threading import Thread
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.kit.processes import MODEL as OTHER_MODEL
from tests.kit.processes import Mesh, Service, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for
from worker_svc.engines.sim.config import SIM_MODEL_DIR, load_sim_model
from worker_svc.engines.sim.token_oracle import TokenOracle

pytestmark = pytest.mark.slow

CONTEXT = 8192
MODEL = "ranker"
_MODEL = load_sim_model(SIM_MODEL_DIR)
ORACLE = TokenOracle(_MODEL.word_ids, _MODEL.eos_ids[0])
TOKENIZER = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
DOCUMENTS = ["Paris is in France", "Bears eat fish", "The capital is Paris", "Bears eat fish"]
QUERY = "Where is Paris?"

mesh = mesh_fixture(workers=1, worker_flags=["--speedup=20", f"--context-length={CONTEXT}"])


@pytest.fixture(scope="module", autouse=True)
def rankers(mesh: Mesh) -> list[Service]:
    """Two workers of a model that only scores; the other model of the mesh does not."""
    workers = [mesh.spawn("worker", f"--model-name={MODEL}", "--serve=score") for _ in range(2)]
    for worker in workers:
        worker.wait_ready()
    wait_for(lambda: MODEL in mesh.model_names(), "the model is served")
    wait_for(mesh.is_complete, "the frontend sees all workers")
    return workers


def ids(first: str, second: str) -> list[int]:
    return list(TOKENIZER.encode(first, second).ids)


def expected(first: str, second: str) -> float:
    return ORACLE.score(ids(first, second))


# Any, here and below: JSON.
def post(mesh: Mesh, path: str, headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **fields}
    return mesh.http.post(f"{mesh.url}{path}", json=body, headers=headers, timeout=WAIT_S)


def rerank(mesh: Mesh, path: str = "/v1/rerank", **fields: Any) -> httpx.Response:
    return post(mesh, path, **{"query": QUERY, "documents": DOCUMENTS, **fields})


def body_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response) -> tuple[int, Any, Any]:
    error = response.json()["error"]
    assert error["message"]
    return response.status_code, error["param"], error["code"]


def accepted(worker: Service) -> int:
    return worker.counters().get("accepted", 0)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_their_scores(mesh: Mesh, path: str) -> None:
    body = body_of(rerank(mesh, path))
    scores = [expected(QUERY, document) for document in DOCUMENTS]
    order = sorted(range(4), key=lambda index: -scores[index])
    assert body["results"] == [
        {
            "index": index,
            "relevance_score": scores[index],
            "document": {"text": DOCUMENTS[index]},
        }
        for index in order
    ]
    assert body["model"] == MODEL
    tokens = sum(len(ids(QUERY, document)) for document in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_a_client_chooses_how_much_of_the_results_it_receives(mesh: Mesh) -> None:
    whole = body_of(rerank(mesh))["results"]
    short = body_of(rerank(mesh, top_n=2, return_documents=False))["results"]
    assert short == [
        {"index": one["index"], "relevance_score": one["relevance_score"]} for one in whole[:2]
    ]


def test_long_documents_are_cut_if_the_client_says_so(mesh: Mesh) -> None:
    long = "Paris is a city. " * 4000
    assert refusal(rerank(mesh, documents=["a", long])) == (
        *(400, "documents[1]"),
        "context_length_exceeded",
    )
    (result,) = body_of(rerank(mesh, documents=[long], max_tokens_per_doc=7))["results"]
    head = long[: TOKENIZER.encode(long, add_special_tokens=False).offsets[6][1]]
    assert result["relevance_score"] == expected(QUERY, head)
    assert result["document"] == {"text": long}


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_are_scored_in_their_order(mesh: Mesh, path: str) -> None:
    for first, second, pairs in (
        (QUERY, DOCUMENTS, [(QUERY, document) for document in DOCUMENTS]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
        ("a", "b", [("a", "b")]),
    ):
        body = body_of(post(mesh, path, text_1=first, text_2=second))
        assert [one["score"] for one in body["data"]] == [expected(*pair) for pair in pairs]
        assert [one["index"] for one in body["data"]] == list(range(len(pairs)))
        tokens = sum(len(ids(*pair)) for pair in pairs)
        assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_the_log_and_the_metrics_count_scores_as_their_own(mesh: Mesh) -> None:
    body_of(rerank(mesh, headers={"x-request-id": "ranked"}))
    line = mesh.request_line("ranked")
    tokens = sum(len(ids(QUERY, document)) for document in DOCUMENTS)
    assert (line["endpoint"], line["status"], line["prompt_tokens"]) == ("rerank", 200, tokens)
    metrics = mesh.http.get(f"{mesh.url}/metrics").text
    sample = f'kvmesh_frontend_requests_total{{endpoint="rerank",error_type="",model="{MODEL}"'
    assert any(line.startswith(sample) for line in metrics.splitlines()), metrics
    wait_for(lambda: not mesh.router.bookings(), "all bookings are free")


@pytest.mark.parametrize(
    ("path", "fields", "error"),
    [
        ("/v1/rerank", {"documents": []}, (400, "documents", "invalid_value")),
        ("/v1/rerank", {"documents": ["a", ""]}, (400, "documents[1]", "invalid_value")),
        ("/v1/rerank", {"documents": ["a"] * 2049}, (400, "documents", "invalid_value")),
        ("/v1/rerank", {"query": "b " * 9000}, (400, "documents[0]", "context_length_exceeded")),
        (
            "/v1/rerank",
            {"documents": ["b " * 4000] * 76},
            (400, "documents", "too_many_tokens"),
        ),
        ("/v1/rerank", {"stream": True}, (400, "stream", "unknown_parameter")),
        ("/v1/rerank", {"model": "none"}, (404, "model", "model_not_found")),
        ("/v1/score", {"text_1": ["a", "b"]}, (400, "text_2", "invalid_value")),
        ("/v1/score", {"text_2": []}, (400, "text_2", "invalid_value")),
        (
            "/v1/score",
            {"truncate_prompt_tokens": 8},
            (400, "truncate_prompt_tokens", "unsupported_parameter"),
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(
    mesh: Mesh, path: str, fields: dict[str, Any], error: tuple[int, Any, Any]
) -> None:
    before = [accepted(worker) for worker in mesh.workers]
    valid: dict[str, Any] = {"query": "a", "documents": ["b"]}
    if path == "/v1/score":
        valid = {"text_1": "a", "text_2": "b"}
    assert refusal(post(mesh, path, **{**valid, **fields})) == error
    assert [accepted(worker) for worker in mesh.workers] == before


def test_a_model_that_is_not_served_for_scores_is_refused(mesh: Mesh) -> None:
    refused = rerank(mesh, model=OTHER_MODEL)
    assert refusal(refused) == (400, "model", "unsupported_parameter")
    assert f"'{OTHER_MODEL}' is not served for scores" in refused.text


def test_a_lost_worker_loses_no_score(mesh: Mesh, rankers: list[Service]) -> None:
    """The last test of the module: it kills a worker."""
    worker = rankers[0]
    documents = [f"Document {number} " + "of words " * 300 for number in range(300)]
    before = accepted(worker)

    def kill() -> None:
        wait_for(lambda: accepted(worker) > before + 8, "it has pairs")
        worker.kill()

    thread = Thread(target=kill)
    thread.start()
    response = post(
        mesh, "/v1/score", headers={"x-request-id": "lost"}, text_1="a", text_2=documents
    )
    thread.join(WAIT_S)
    scores = [one["score"] for one in body_of(response)["data"]]
    assert scores == [expected("a", document) for document in documents]
    line = mesh.request_line("lost")
    assert line["attempts"] > len(documents), "some pairs needed another attempt"
    assert len(line["workers"]) == 2
