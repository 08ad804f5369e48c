"""Drafted tokens that an engine reports: in the usage of responses and in the worker's metrics."""

from __future__ import annotations

from tests.kit.processes import MODEL, Mesh, mesh_fixture

FLAGS = ["--engine=tests.e2e.drafting_engine:make", f"--model-name={MODEL}", "--metrics-port=0"]
mesh = mesh_fixture(workers=1, worker_flags=FLAGS)


def test_drafted_tokens_are_in_the_usage_and_counted_by_the_worker(mesh: Mesh) -> None:
    (worker,) = mesh.workers
    prompt, expected = [[5, 6, 7], [8, 9]], {"accepted": 6, "rejected": 10}

    def counts() -> dict[str, float]:
        name = "kvmesh_worker_draft_tokens_total"
        return {one: worker.metric(f'{name}{{result="{one}"}}') for one in expected}

    before = counts()
    response = mesh.post_completion("drafts", prompt)  # type: ignore[arg-type]
    details = response.json()["usage"]["completion_tokens_details"]
    found = {name.removesuffix("_prediction_tokens"): count for name, count in details.items()}
    assert found == expected, "of both prompts"
    assert {name: count - before[name] for name, count in counts().items()} == expected
