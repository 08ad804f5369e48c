"""The Attach stream between a frontend and a worker, both ends. Pure.

`FrontendLink` and `WorkerLink` are the two ends of one stream; time is an argument, so production
and simulation run the same objects. The rules (a)-(i) are defined in
`kvmesh/engine/v1/engine.proto`; letters in comments refer to them.

Invariants of both ends: token offsets of a slot have no gap and no duplicate; a slot ends exactly
once; queued output belongs to an open slot or is its end; a lost stream sends nothing.
"""

from common.request.token_stream.frames import ARRIVING_BYTES_MAX, ARRIVING_BYTES_MAX_PER_STREAM
from common.request.token_stream.frames import SUBMITS_PER_FRAME_MAX
from common.request.token_stream.frames import CREDIT_BYTES, FRAME_BYTES, HEARTBEAT_S
from common.request.token_stream.frames import ATTACH_BREACH, ENGINE_FAILURE_CHARS_MAX
from common.request.token_stream.frames import PROMPT_BYTES_MAX
from common.request.token_stream.frames import PROMPT_PART_BYTES, AbortSlot, Hello, HelloAck
from common.request.token_stream.frames import JsonChunk, LegChanges, LegRequest, LegSink
from common.request.token_stream.frames import PromptPart, Rejected
from common.request.token_stream.frames import RequestFrame, ResponseFrame, Terminal
from common.request.token_stream.frontend import FrontendLink
from common.request.token_stream.worker import ArrivingPrompts, StartSlot, WorkerLink
