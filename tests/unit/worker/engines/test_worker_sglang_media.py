"""Images of SGLang workers, without SGLang: which models take them, and their tokens in events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequest, MeshError, Unsupported
from common.request.media import MediaHashes, MediaInput, content_hash, with_media
from common.request.preprocessed import MediaUrl, PreprocessedRequest, TokenIds
from worker_svc.engines.sglang.media import (
    IDENTIFIERS_MAX,
    ImageModel,
    ImageWords,
    read_image_model,
    read_images,
)
from worker_svc.kv_events.external_events import PagesStored
from worker_svc.kv_events.zmq_reader import parse_events

START, END, PLACEHOLDER = 90, 91, 92
MODEL = ImageModel(MediaInput(PLACEHOLDER, 6, 8, 1 << 20), START, END, {})
IMAGE = [START, *[PLACEHOLDER] * 6, END]
URL = MediaUrl("data:image/png;base64,Y2F0")
ON = {"enable_multimodal": True}


def write_model(folder: Path, **config: Any) -> Path:
    tokens = {"boi": START, "eoi": END, "image": PLACEHOLDER}
    indices = {f"{name}_token_index": token for name, token in tokens.items()}
    settings = {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 6}
    (folder / "config.json").write_text(json.dumps(settings | indices | config))
    added = [{"id": token, "content": f"<{name}>"} for name, token in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder


def request(token_ids: list[int], *images: MediaUrl) -> PreprocessedRequest:
    return PreprocessedRequest(
        token_ids=TokenIds.of(token_ids), multi_modal_data={"image_url": images}
    )


def test_gemma_3_takes_images_if_the_operator_asks_for_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert read_image_model(folder, {}, "aggregated") is None
    limits = ON | {"limit_mm_data_per_request": {"image": 2}}
    model = read_image_model(folder, limits, "aggregated")
    assert model is not None
    assert (model.input.token_id, model.input.tokens, model.input.count_max) == (PLACEHOLDER, 6, 2)
    assert model.template_texts == {"<boi>": r"\n\n<boi><image><eoi>\n\n"}


def test_other_models_and_roles_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="role aggregated, not prefill"):
        read_image_model(write_model(tmp_path), ON, "prefill")
    other = write_model(tmp_path, architectures=["Qwen2VLForConditionalGeneration"])
    with pytest.raises(Unsupported, match="this model is Qwen2VLForConditionalGeneration"):
        read_image_model(other, ON, "aggregated")


def test_images_are_found_between_their_tokens() -> None:
    found = read_images(request([1, *IMAGE, 2, *IMAGE, PLACEHOLDER], URL, URL), MODEL)
    assert found is not None
    assert (found.contents, found.ranges) == ([b"cat", b"cat"], [(2, 7), (11, 16)])
    assert read_images(request([1, 2]), MODEL) is None


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2, 3],
        [*IMAGE, START],
        [*IMAGE, END],
        [*IMAGE, *IMAGE],
        [PLACEHOLDER, *IMAGE],
        IMAGE[:3] + IMAGE[4:],
        [START, *IMAGE[2:], PLACEHOLDER, 1, END],
    ],
)
def test_other_image_tokens_than_those_of_the_images_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="1 images need 1 runs of 6"):
        read_images(request(token_ids, URL), MODEL)


@pytest.mark.parametrize("model", [None, MODEL])
def test_media_that_the_model_does_not_take_are_refused(model: ImageModel | None) -> None:
    part = "image_url" if model is None else "audio_url"
    body = PreprocessedRequest(token_ids=TokenIds.of([1]), multi_modal_data={part: (URL,)})
    with pytest.raises(MeshError, match="does not take"):
        read_images(body, model)


def stored(token_ids: list[int]) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None}
    return event | {"token_ids": token_ids, "block_size": len(token_ids)}


def test_events_have_the_routing_tokens_of_an_image() -> None:
    identifiers = [(1 << 61) + one for one in range(4)]
    words = ImageWords()
    words.add(b"cat", identifiers)
    sequence = [1, START, *identifiers, *identifiers[:2], END]
    (event,) = parse_events([stored(sequence)], 0, words.replace)
    assert isinstance(event, PagesStored)
    routed = with_media(
        TokenIds.of([1, *IMAGE]), [MediaHashes(MODEL.input, [content_hash(b"cat")])]
    )
    assert np.frombuffer(event.token_ids, "<u4").tolist() == routed.tolist()
    assert event.salt == ""


def test_pages_of_unknown_images_are_not_indexed() -> None:
    words = ImageWords()
    for image in range(IDENTIFIERS_MAX // 4 + 1):
        words.add(b"%d" % image, [(1 << 40) + 4 * image + one for one in range(4)])
    for identifier, salt in ((1 << 40, None), ((1 << 40) + 4, ""), ((1 << 61), None)):
        (event,) = parse_events([stored([1, identifier])], 0, words.replace)
        assert isinstance(event, PagesStored)
        assert event.salt == salt
