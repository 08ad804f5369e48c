"""The preprocessed request: the values that a frontend sends to a worker. Pure.

Both wire forms derive from the declarations: JSON in `codecs.py`, protobuf in
`common/wire/preprocessed.py`.

Invariants: all types but `PreprocessedRequest` and `RequestTracker` are values that never change;
collections are tuples, frozensets and dicts that never change; arbitrary JSON is kept as parsed.
"""

from common.request.preprocessed.codecs import JsonValue, dump_json_text, from_json, from_json_value
from common.request.preprocessed.codecs import load_json_text, to_json, to_json_value
from common.request.preprocessed.media import BlockExtraInfo, MediaRawUrl, MediaUrl, MmObject
from common.request.preprocessed.media import MmRoutingInfo, MultimodalData, NixlDescriptor
from common.request.preprocessed.media import RdmaMediaDataDescriptor, check_absolute_url
from common.request.preprocessed.options import (
    CONSTRAINT_PREFIX,
    PENALTY_PREFIX,
    GuidedDecoding,
    OutputOptions,
)
from common.request.preprocessed.options import SamplingOptions, StopConditions
from common.request.preprocessed.request import BootstrapInfo, PreprocessedEmbeddingRequest
from common.request.preprocessed.request import PreprocessedRequest, RequestTracker
from common.request.preprocessed.request import option_names, unsupported_fields
from common.request.preprocessed.request import unsupported_options
from common.request.preprocessed.response import CompletionTokensDetails, CompletionUsage
from common.request.preprocessed.response import FinishReason, PrefillResult, PromptTokensDetails
from common.request.preprocessed.response import sum_completion_details, sum_prompt_details
from common.request.preprocessed.response import TokenLogprob, TopLogprob, TraceLink, usage
from common.request.preprocessed.routing import AgentContext, RouterConfigOverride, RouterParams
from common.request.preprocessed.routing import RoutingConstraints, RoutingHints, SessionAction
from common.request.preprocessed.routing import SessionControl
from common.request.preprocessed.token_ids import TokenIds
