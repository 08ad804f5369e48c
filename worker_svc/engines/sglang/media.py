"""Images of requests for SGLang, and what stands for them in its KV events. No SGLang import.

The adapter preprocesses images itself and passes token ids, tensors and content hashes, so SGLang
neither reads text again nor computes hashes of its own. In prompts, and so in KV events, SGLang
replaces the tokens of an image by four identifiers of 62 bits by turns, which it derives from the
content hash. `ImageWords` maps them to the halves of the hash, as in `common.request.media`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.errors import InvalidRequest, Unsupported
from common.registry.instances import Role
from common.request.media import (
    PART_NAMES,
    PIXELS_MAX,
    MediaInput,
    content_hash,
    media_words,
    read_data_url,
)
from common.request.preprocessed import MediaUrl, PreprocessedRequest
from common.trials.fair_trials import FairTrials
from common.trials.trial import Trial, TrialExceeded, TrialLimits, TrialRefused

# SGLang's identifiers begin here; it refuses models with more tokens.
IDENTIFIER_MIN: Final = 1_000_000
# Identifiers that are kept: of 16,384 images.
IDENTIFIERS_MAX: Final = 1 << 16
IMAGES_MAX: Final = 8
IMAGE_BYTES_MAX: Final = 20 << 20
IMAGE_TRIAL: Final = f"{__name__}:try_images"
PREPARE_IMAGES: Final = f"{__name__}:prepare_image_trials"
IMAGE_LIMITS: Final = TrialLimits(cpu_s=10.0, wall_s=60.0, memory_bytes=1 << 30)

_ARGUMENT: Final = "engine_args.enable_multimodal"
_PART: Final = PART_NAMES["image"]


@dataclass(frozen=True, slots=True)
class ImageModel:
    """How a model takes images: each is start_id, the placeholders of `input`, and end_id.

    template_texts: what the chat template must print instead of the model's own marker.
    """

    input: MediaInput
    start_id: int
    end_id: int
    template_texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a request: contents and token ranges (first and last), in prompt order."""

    contents: Sequence[bytes]
    ranges: Sequence[tuple[int, int]]


# Any, here and below: JSON-like values.
def read_image_model(folder: Path, engine_args: Mapping[str, Any], role: Role) -> ImageModel | None:
    """Returns how the model takes images; None without SGLang's argument `enable_multimodal`.

    Raises Unsupported for another model than Gemma 3, and for prefill and decode.
    """
    if not engine_args.get("enable_multimodal"):
        return None
    config = json.loads((folder / "config.json").read_bytes())
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture != "Gemma3ForConditionalGeneration":
        reason = f"images need Gemma3ForConditionalGeneration; this model is {architecture}"
        raise Unsupported(_ARGUMENT, reason)
    if role != "aggregated":
        raise Unsupported(_ARGUMENT, f"images need the role aggregated, not {role}")
    start, placeholder, end = (config[f"{name}_token_index"] for name in ("boi", "image", "eoi"))
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    texts = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    # As Gemma3Processor prints it, with the line ends as they are written in a template's string.
    text = f"\\n\\n{texts[start]}{texts[placeholder]}{texts[end]}\\n\\n"
    limits = engine_args.get("limit_mm_data_per_request") or {}
    return ImageModel(
        MediaInput(
            token_id=placeholder,
            tokens=config["mm_tokens_per_image"],
            count_max=limits.get("image", IMAGES_MAX),
            bytes_max=IMAGE_BYTES_MAX,
        ),
        start,
        end,
        {texts[start]: text},
    )


def read_images(request: PreprocessedRequest, model: ImageModel | None) -> Images | None:
    """Returns the images of a request. Raises Unsupported and InvalidRequest, naming the field."""
    parts = {part: items for part, items in request.multi_modal_data.items() if items}
    if not parts:
        return None
    for part in parts:
        if model is None or part != _PART:
            raise Unsupported(f"multi_modal_data.{part}", "the model does not take it")
    assert model is not None
    contents = []
    for index, item in enumerate(parts[_PART]):
        field = f"multi_modal_data.{_PART}[{index}]"
        if not isinstance(item, MediaUrl):
            raise Unsupported(field, "SGLang workers take data: URLs only")
        contents.append(read_data_url(item.url, field)[1])
    return Images(contents, _find_ranges(request, model, len(contents)))


def _find_ranges(
    request: PreprocessedRequest, model: ImageModel, count: int
) -> list[tuple[int, int]]:
    """Returns the range of each image in the prompt. Raises InvalidRequest if SGLang, which finds
    images by their start and end tokens, would find others: it would compute with the placeholders,
    and blocks of different images would be equal."""
    ids = request.token_ids.array
    length = model.input.tokens
    starts, ends = (np.flatnonzero(ids == token_id) for token_id in (model.start_id, model.end_id))
    placeholders = np.flatnonzero(ids == model.input.token_id)
    expected = starts[:, None] + 1 + np.arange(length)
    if (
        len(starts) != count
        or not np.array_equal(ends, starts + length + 1)
        or not np.array_equal(placeholders[: count * length], expected.ravel())
    ):
        text = f"{count} images need {count} runs of {length} placeholders between their own tokens"
        raise InvalidRequest(f"token_ids: {text}, and no such tokens elsewhere", "token_ids")
    return [(int(start) + 1, int(start) + length) for start in starts]


# Any: SGLang's image processor and its tensors.
def image_arguments(images: Images, image_processor: Any) -> dict[str, Any]:
    """Returns SGLang's arguments for images. Takes tens of milliseconds each.

    Raises InvalidRequest for a content that is not an image.
    """
    pixels = image_processor(
        [_decode(content, index) for index, content in enumerate(images.contents)],
        return_tensors="pt",
        do_pan_and_scan=False,
    )["pixel_values"]
    data = {"format": "processor_output", "pixel_values": pixels, "offsets": images.ranges}
    hashes = [f"{content_hash(content):x}" for content in images.contents]
    return {"image_data": [data], "mm_hashes": hashes}


def prepare_image_trials() -> None:
    """Imports what `try_images` needs."""
    from PIL import Image  # type: ignore[import-not-found]

    Image.init()


def try_images(contents: Sequence[bytes]) -> None:
    """Decodes images, one after the other: in a trial, before this process does. Raises
    InvalidRequest for a content that is not an image."""
    for index, content in enumerate(contents):
        _decode(content, index)


async def check_images(images: Images, trials: FairTrials, sender: str, deadline_s: float) -> None:
    """Raises InvalidRequest if decoding exceeds a limit, and the errors of `FairTrials.run`. What
    is invalid within the limits passes: `image_arguments` raises then. deadline_s: of the wait for
    images of others, on the loop's clock."""
    trial = Trial(IMAGE_TRIAL, (tuple(images.contents),), IMAGE_LIMITS)
    try:
        await trials.run(trial, sender, deadline_s)
    except TrialRefused:
        pass
    except TrialExceeded as error:
        field = f"multi_modal_data.{_PART}"
        text = f"Invalid '{field}': the images cannot be decoded: {error}."
        raise InvalidRequest(text, field, reason="INVALID_MEDIA") from error


def _decode(content: bytes, index: int) -> Any:
    # Installed with SGLang.
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > PIXELS_MAX:
                raise ValueError(f"{image.width}x{image.height} pixels, at most {PIXELS_MAX}")
            return image.convert("RGB")
    except MemoryError:  # the limit of a trial
        raise
    # Pillow raises many types for damaged files.
    except Exception as error:
        field = f"multi_modal_data.{_PART}[{index}]"
        text = f"Invalid '{field}': the image cannot be decoded: {error}"
        raise InvalidRequest(text, field, reason="INVALID_MEDIA") from None


class ImageWords:
    """The tokens of `common.request.media` for SGLang's identifiers of the latest images."""

    def __init__(self) -> None:
        self._words: dict[int, int] = {}

    def add(self, content: bytes, identifiers: Sequence[int]) -> None:
        """Adds an image. identifiers: for its tokens by turns."""
        words = media_words(content_hash(content), len(identifiers)).tolist()
        for identifier, word in zip(identifiers, words, strict=True):
            self._words.pop(identifier, None)
            self._words[identifier] = word
        while len(self._words) > IDENTIFIERS_MAX:
            del self._words[next(iter(self._words))]

    def replace(self, token_ids: Iterable[int]) -> list[int] | None:
        """Returns the tokens with words for identifiers; None if one is unknown."""
        tokens = []
        for token in token_ids:
            word = token if token < IDENTIFIER_MIN else self._words.get(token)
            if word is None:
                return None
            tokens.append(word)
        return tokens
