"""Media parts of a chat: checks, placeholders, and the fields of the request (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from common.errors import InvalidRequest, Unsupported
from common.request.media import (
    PART_NAMES,
    MediaHashes,
    MediaInput,
    block_media,
    expand_placeholders,
    with_media,
)
from common.request.preprocessed import MediaUrl, MmRoutingInfo, PreprocessedRequest, TokenIds
from frontend_svc.openai.body.schema import (
    AudioUrlPart,
    ChatRequest,
    ImagePart,
    InputAudioPart,
    TextPart,
)
from frontend_svc.openai.body.validation_errors import INVALID_VALUE


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A part of a message of a role. kind: as in a card. field: its path in the body."""

    kind: str
    url: str
    field: str
    role: str


@dataclass(frozen=True, slots=True)
class Medium:
    """A loaded part. url: a `data:` URL with the content. mm_hash: `content_hash` of it."""

    kind: str
    url: str
    mm_hash: int


def media_parts(body: ChatRequest) -> list[MediaPart]:
    """Returns the media of a chat in the order of the prompt."""
    return [
        _media_part(part, f"messages[{number}].content[{index}]", message.role)
        for number, message in enumerate(body.messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if not isinstance(part, TextPart)
    ]


def _media_part(part: ImagePart | AudioUrlPart | InputAudioPart, path: str, role: str) -> MediaPart:
    match part:
        case ImagePart(image_url=image):
            return MediaPart("image", image.url, f"{path}.image_url", role)
        case AudioUrlPart(audio_url=audio):
            return MediaPart("audio", audio.url, f"{path}.audio_url", role)
        case InputAudioPart(input_audio=audio):
            url = f"data:audio/{audio.format};base64,{audio.data}"
            return MediaPart("audio", url, f"{path}.input_audio", role)


def check_media(parts: Sequence[MediaPart], inputs: Mapping[str, MediaInput], model: str) -> None:
    """Raises Unsupported for a kind that the model does not take and for another role than user and
    tool, InvalidRequest for too many."""
    if not parts:
        return
    counts: Counter[str] = Counter()
    for part in parts:
        if part.role not in ("user", "tool"):
            raise Unsupported(part.field, f"messages of role '{part.role}' have only text")
        if part.kind not in inputs:
            raise Unsupported(part.field, f"the model {model!r} takes no {part.kind} input")
        counts[part.kind] += 1
        limit = inputs[part.kind].count_max
        if counts[part.kind] > limit:
            text = f"the model takes at most {limit} parts of kind {part.kind}"
            message = f"Invalid '{part.field}': {text}."
            raise InvalidRequest(message, part.field, reason=INVALID_VALUE)


def expand_media(
    token_ids: Sequence[int], parts: Sequence[MediaPart], inputs: Mapping[str, MediaInput]
) -> Sequence[int]:
    """Returns the prompt with all placeholders of its media. Raises InvalidRequest if it has
    neither one placeholder for each medium nor all of them, as in token ids that were returned to a
    client."""
    if not parts:
        return token_ids
    counts, ids = Counter(part.kind for part in parts), TokenIds.of(token_ids)
    compact: list[MediaInput] = []
    for kind, media_input in inputs.items():
        found = int((ids.array == media_input.token_id).sum())
        if found == counts[kind]:
            compact.append(media_input)
        elif found != counts[kind] * media_input.tokens:
            text = f"{found} placeholders for {counts[kind]} parts of kind {kind}"
            raise InvalidRequest(f"Invalid 'messages': the prompt has {text}.", "messages")
    return expand_placeholders(ids, compact)


def add_media(
    request: PreprocessedRequest,
    media: Sequence[Medium],
    inputs: Mapping[str, MediaInput],
    block_size: int,
) -> PreprocessedRequest:
    """Returns the request with its media and their part in its identity."""
    kinds = {kind: [medium for medium in media if medium.kind == kind] for kind in inputs}
    hashes = [
        MediaHashes(inputs[kind], [item.mm_hash for item in items])
        for kind, items in kinds.items()
        if items
    ]
    return replace(
        request,
        multi_modal_data={
            PART_NAMES[kind]: tuple(MediaUrl(item.url) for item in items)
            for kind, items in kinds.items()
            if items
        },
        mm_routing_info=MmRoutingInfo(
            routing_token_ids=with_media(request.token_ids, hashes),
            block_mm_infos=block_media(request.token_ids, hashes, block_size),
        ),
    )
