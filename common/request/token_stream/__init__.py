"""The Attach stream between a frontend and a worker, both ends. Pure.

`FrontendLink` and `WorkerLink` are the two ends of one stream; time is an argument, so production
and simulation run the same objects. The rules (a)-(i) are defined in
`kvmesh/engine/v1/engine.proto`; letters in comments refer to them.

Invariants of both ends: token offsets of a slot have no gap and no duplicate; a slot ends exactly
once; queued output belongs to an open slot or is its end; a lost stream sends nothing.
"""

from common.request.token_stream.frames import (
    CREDIT_BYTES as CREDIT_BYTES,
    FRAME_BYTES as FRAME_BYTES,
    HEARTBEAT_S as HEARTBEAT_S,
    MISSED_HEARTBEATS_MAX as MISSED_HEARTBEATS_MAX,
    PROMPT_BYTES_MAX as PROMPT_BYTES_MAX,
    PROMPT_PART_BYTES as PROMPT_PART_BYTES,
    AbortSlot as AbortSlot,
    Hello as Hello,
    HelloAck as HelloAck,
    JsonChunk as JsonChunk,
    LegRequest as LegRequest,
    LegSink as LegSink,
    PromptPart as PromptPart,
    Rejected as Rejected,
    RequestFrame as RequestFrame,
    ResponseFrame as ResponseFrame,
    Submit as Submit,
    Terminal as Terminal,
)
from common.request.token_stream.frontend import FrontendLink as FrontendLink
from common.request.token_stream.worker import (
    StartSlot as StartSlot,
    StopSlot as StopSlot,
    WorkerLink as WorkerLink,
)
