"""The preprocessed request: the values that a frontend sends to a worker. Pure.

Both wire forms derive from the declarations: JSON in `codecs.py`, protobuf in
`common/wire/preprocessed.py`.

Invariants: all types but `PreprocessedRequest`, `RoutingHints` and `RequestTracker` are frozen;
collections are tuples, frozensets and dicts that never change; arbitrary JSON is kept as parsed.
"""

from common.request.preprocessed.codecs import (
    JsonValue as JsonValue,
    dump_json_text as dump_json_text,
    from_json as from_json,
    from_json_value as from_json_value,
    load_json_text as load_json_text,
    to_json as to_json,
    to_json_value as to_json_value,
)
from common.request.preprocessed.media import (
    BlockExtraInfo as BlockExtraInfo,
    MediaRawUrl as MediaRawUrl,
    MediaUrl as MediaUrl,
    MmObject as MmObject,
    MmRoutingInfo as MmRoutingInfo,
    MultimodalData as MultimodalData,
    NixlDescriptor as NixlDescriptor,
    RdmaMediaDataDescriptor as RdmaMediaDataDescriptor,
    check_absolute_url as check_absolute_url,
)
from common.request.preprocessed.options import (
    GuidedDecoding as GuidedDecoding,
    OutputOptions as OutputOptions,
    SamplingOptions as SamplingOptions,
    StopConditions as StopConditions,
)
from common.request.preprocessed.request import (
    BootstrapInfo as BootstrapInfo,
    PreprocessedEmbeddingRequest as PreprocessedEmbeddingRequest,
    PreprocessedRequest as PreprocessedRequest,
    RequestTracker as RequestTracker,
    unsupported_fields as unsupported_fields,
)
from common.request.preprocessed.response import (
    CompletionTokensDetails as CompletionTokensDetails,
    CompletionUsage as CompletionUsage,
    FinishReason as FinishReason,
    PrefillResult as PrefillResult,
    PromptTokensDetails as PromptTokensDetails,
    TokenLogprob as TokenLogprob,
    TopLogprob as TopLogprob,
    TraceLink as TraceLink,
    usage as usage,
)
from common.request.preprocessed.routing import (
    AgentContext as AgentContext,
    RouterConfigOverride as RouterConfigOverride,
    RouterParams as RouterParams,
    RoutingConstraints as RoutingConstraints,
    RoutingHints as RoutingHints,
    SessionAction as SessionAction,
    SessionControl as SessionControl,
)
from common.request.preprocessed.token_ids import TokenIds as TokenIds
