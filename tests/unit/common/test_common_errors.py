"""Error classes: their parts, their status codes, restoring them from parts."""

from __future__ import annotations

import re

import pytest

from common import errors


def test_kinds_are_unique_stable_tokens() -> None:
    kinds = [cls.kind for cls in errors.MESH_ERROR_CLASSES]
    assert len(set(kinds)) == len(kinds)
    assert all(re.fullmatch(r"[A-Z]+(_[A-Z]+)*", kind) for kind in kinds)


def test_every_error_class_has_a_status_code() -> None:
    found: list[type[errors.MeshError]] = []
    todo: list[type[errors.MeshError]] = [errors.MeshError]
    while todo:
        children = todo.pop().__subclasses__()
        found += [cls for cls in children if cls.__module__ == errors.__name__]
        todo += children
    assert set(found) == set(errors.MESH_ERROR_CLASSES)


def test_the_reason_defaults_to_the_kind() -> None:
    assert errors.Unavailable("no worker").reason == "UNAVAILABLE"
    assert errors.Unavailable("no worker", reason="NO_DECODE_WORKER").reason == "NO_DECODE_WORKER"


def test_an_unsupported_field_is_an_invalid_request_that_names_it() -> None:
    error = errors.Unsupported("logit_bias", "the engine has no hook for it")
    assert isinstance(error, errors.InvalidRequest)
    assert error.field == "logit_bias"
    assert str(error) == "'logit_bias' is not supported: the engine has no hook for it."


def test_an_unknown_model_is_named() -> None:
    error = errors.UnknownModel("llama")
    assert isinstance(error, errors.NotFound)
    assert (error.field, error.metadata["model"]) == ("model", "llama")
    assert "'llama'" in error.message


def test_only_overload_and_unavailability_are_retryable_by_default() -> None:
    retryable = {cls for cls in errors.MESH_ERROR_CLASSES if cls.retryable}
    assert retryable == {errors.Overloaded, errors.Unavailable}
    assert errors.WorkerLost(retryable=True).retryable
    assert not errors.WorkerLost(retryable=False).retryable


def test_metadata_is_a_copy_that_cannot_be_changed() -> None:
    facts = {"limit": "8"}
    error = errors.PromptTooLong("too long", "prompt", metadata=facts)
    facts["limit"] = "9"
    assert error.metadata == {"limit": "8"}
    with pytest.raises(TypeError):
        error.metadata["limit"] = "9"  # type: ignore[index]


@pytest.mark.parametrize("cls", errors.MESH_ERROR_CLASSES)
def test_every_class_can_be_restored_from_its_parts(cls: type[errors.MeshError]) -> None:
    error = cls.restore(
        "why", field="f", retry_after_s=1.5, reason="R", metadata={"k": "v"}, retryable=True
    )
    assert type(error) is cls
    assert (str(error), error.message, error.field) == ("why", "why", "f")
    assert (error.retry_after_s, error.reason, error.retryable) == (1.5, "R", True)
    assert error.metadata == {"k": "v"}
