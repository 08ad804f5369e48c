"""Configured aliases, whose requests are shared by several models (pure).

    {"chat": {"variants": [{"model": "a", "weight": 90}, {"model": "b", "weight": 10}],
              "sticky": "session", "fallback": ["c"]}}

A *variant* is a model, an adapter or an alias of a worker that serves a part of the requests of an
alias. Requests with one sticky key have one variant, at every frontend: weighted rendezvous
hashing, so that a change of a weight moves only as many keys as it must. A request without a key
draws its variant. If no worker serves the variant, the first served model of `fallback` does, if
there is one: other variants never replace it, so that the parts stay as they are configured.

An alias wins over a model of the same name. Its variants and its fall-back are models, never
configured aliases: `{"a": {"variants": [{"model": "a"}], "fallback": ["b"]}}` gives a model a
fall-back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from common.errors import InvalidRequest

ALIASES_MAX = 256
NAME_CHARS_MAX = 512
VARIANTS_MAX = 16
Sticky = Literal["session", "tenant", "none"]

# Header values, too.
ModelName = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=NAME_CHARS_MAX)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Variant(_Part):
    """A model that serves a part of the requests of an alias."""

    model: ModelName
    weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Part of the requests, relative to the other variants. 0: none."""


class WeightedAlias(_Part):
    """The models behind one name."""

    variants: Annotated[list[Variant], Field(min_length=1, max_length=VARIANTS_MAX)]
    sticky: Sticky = "session"
    """Whose requests have one variant: those of a conversation, of a tenant, or none."""

    fallback: Annotated[tuple[ModelName, ...], Field(max_length=VARIANTS_MAX, strict=False)] = ()
    """Models that serve requests of a variant without a worker: the first one that has any."""

    @property
    def main_model(self) -> str:
        """The variant with the greatest weight."""
        return max(self.variants, key=lambda variant: variant.weight).model


Aliases = Mapping[str, WeightedAlias]


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """The model of one request to an alias."""

    alias: str

    variant: str
    """Chosen by the weights."""

    model: str
    """Serves the request."""

    @property
    def is_fallback(self) -> bool:
        return self.model != self.variant


_ALIASES = TypeAdapter(dict[ModelName, WeightedAlias])


def parse_aliases(raw: bytes) -> Aliases:
    """Returns the aliases of a file. Raises InvalidRequest, which names the line of invalid JSON,
    or the path of the first invalid field."""
    try:
        aliases = _ALIASES.validate_python(orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not valid JSON: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        steps = (f"[{one}]" if isinstance(one, int) else f".{one}" for one in first["loc"])
        raise _invalid("".join(steps).removeprefix(".") or "aliases", first["msg"]) from None
    if len(aliases) > ALIASES_MAX:
        raise _invalid("aliases", f"{len(aliases)} aliases, and {ALIASES_MAX} are allowed")
    for name, alias in aliases.items():
        _check(name, alias, aliases)
    return aliases


def _check(name: str, alias: WeightedAlias, aliases: Aliases) -> None:
    models = [variant.model for variant in alias.variants]
    if len(set(models)) < len(models):
        raise _invalid(f"{name}.variants", "two variants have the same model")
    if not sum(variant.weight for variant in alias.variants):
        raise _invalid(f"{name}.variants", "each variant has the weight 0")
    paths = [f"variants[{at}].model" for at in range(len(models))]
    paths += [f"fallback[{at}]" for at in range(len(alias.fallback))]
    for path, model in zip(paths, (*models, *alias.fallback), strict=True):
        named = aliases.get(model)
        if named is not None and model not in (variant.model for variant in named.variants):
            raise _invalid(f"{name}.{path}", f"{model!r} is an alias of this file; name a model")


def _invalid(path: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{path}': {text}.", path)


def sticky_key(alias: WeightedAlias, session: bytes, tenant: str) -> bytes:
    """Returns the key by which requests have one variant; b"": each draws its own.

    - session: the name of the conversation; b"": it has none.
    """
    match alias.sticky:
        case "session":
            return session
        case "tenant":
            return tenant.encode()
        case "none":
            return b""


def choose(
    name: str, alias: WeightedAlias, key: bytes, is_served: Callable[[str], bool], rng: Random
) -> VariantChoice:
    """Returns the model of a request.

    - key: the sticky key; b"" draws a variant.
    - is_served: whether a worker serves a model now.
    """
    variant = _draw(alias, rng) if not key else _of_key(name, alias, key)
    if is_served(variant):
        return VariantChoice(name, variant, variant)
    fallback = next(filter(is_served, alias.fallback), variant)
    return VariantChoice(name, variant, fallback)


def _draw(alias: WeightedAlias, rng: Random) -> str:
    weights = [variant.weight for variant in alias.variants]
    return rng.choices(alias.variants, weights)[0].model


def _of_key(name: str, alias: WeightedAlias, key: bytes) -> str:
    """Returns the variant with the least -ln(u) / weight; u: uniform in (0, 1) by the hash of
    variant and key."""

    def distance(variant: Variant) -> float:
        if not variant.weight:
            return math.inf
        text = f"{name}\0{variant.model}\0".encode() + key
        number = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        return -math.log((number + 1) / (2**64 + 2)) / variant.weight

    return min(alias.variants, key=distance).model
