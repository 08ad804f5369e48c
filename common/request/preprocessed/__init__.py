"""The preprocessed request: the values that a frontend sends to a worker. Pure.

Both wire forms derive from the declarations: JSON in `codecs.py`, protobuf in
`common/wire/preprocessed.py`.

Invariants: all types but `PreprocessedRequest`, `RoutingHints` and `RequestTracker` are frozen;
collections are tuples, frozensets and dicts that never change; arbitrary JSON is kept as parsed.
"""

from common.request.preprocessed.codecs import (
    JsonValue,
    dump_json_text,
    from_json,
    from_json_value,
    load_json_text,
    to_json,
    to_json_value,
)
from common.request.preprocessed.media import (
    BlockExtraInfo,
    MediaRawUrl,
    MediaUrl,
    MmObject,
    MmRoutingInfo,
    MultimodalData,
    NixlDescriptor,
    RdmaMediaDataDescriptor,
    check_absolute_url,
)
from common.request.preprocessed.options import (
    GuidedDecoding,
    OutputOptions,
    SamplingOptions,
    StopConditions,
)
from common.request.preprocessed.request import (
    BootstrapInfo,
    PreprocessedEmbeddingRequest,
    PreprocessedRequest,
    RequestTracker,
    TimingPoint,
    unsupported_fields,
)
from common.request.preprocessed.response import (
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    PrefillResult,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    TraceLink,
    usage,
)
from common.request.preprocessed.routing import (
    AgentContext,
    RouterConfigOverride,
    RouterParams,
    RoutingConstraints,
    RoutingHints,
    SessionAction,
    SessionControl,
)
from common.request.preprocessed.token_ids import (
    TOKEN_ID_MAX,
    TokenIds,
)

__all__ = [
    "AgentContext",
    "BlockExtraInfo",
    "BootstrapInfo",
    "CompletionTokensDetails",
    "CompletionUsage",
    "FinishReason",
    "GuidedDecoding",
    "JsonValue",
    "MediaRawUrl",
    "MediaUrl",
    "MmObject",
    "MmRoutingInfo",
    "MultimodalData",
    "NixlDescriptor",
    "OutputOptions",
    "PrefillResult",
    "PreprocessedEmbeddingRequest",
    "PreprocessedRequest",
    "PromptTokensDetails",
    "RdmaMediaDataDescriptor",
    "RequestTracker",
    "RouterConfigOverride",
    "RouterParams",
    "RoutingConstraints",
    "RoutingHints",
    "SamplingOptions",
    "SessionAction",
    "SessionControl",
    "StopConditions",
    "TOKEN_ID_MAX",
    "TimingPoint",
    "TokenIds",
    "TokenLogprob",
    "TopLogprob",
    "TraceLink",
    "check_absolute_url",
    "dump_json_text",
    "from_json",
    "from_json_value",
    "load_json_text",
    "to_json",
    "to_json_value",
    "unsupported_fields",
    "usage",
]
