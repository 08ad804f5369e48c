"""Finds requests that an engine has lost while it works. Pure.

A request is quiet from its last output on, at first from its admission. The watch reads the loads
of the engine every SAMPLE_S and counts samples that nothing but a loss explains:

- idle: the rank has no request and makes no step. It may be in a first step that it does not
  report yet. A response to a later probe proves that it is not, and so does the step limit.
- the request had no output yet, and the rank makes a step in which it computes no prompt, or in
  which its prompt must have been computed: the rank has computed as many tokens since as there were
  in all prompts before it and its own.
- the request had output, and another started request of its rank has more.

A request is overdue after QUIET_S and SAMPLES_MIN such samples. It is not lost if it may wait, for
a slot, for memory or for KV of another worker: if the rank reports waiting requests at each sample,
and at some sample as many as there are requests without output and quiet ones. If it reports fewer,
the difference is how many may be lost; of these only those that a later request without a higher
priority has passed. A request that may wait starts anew: when it leaves the queue, it has the whole
time again. Of an engine that does not serve requests in order, a later request proves nothing: a
request is then lost only if none of its rank waits.

What also explains silence:

- Memory: a rank with more than KV_FULL of its blocks in use may have preempted a started request.
  After a wait such a request computes its tokens again.
- Preparation: a constraint or media may be compiled or decoded before the engine counts a request,
  and later requests pass it meanwhile. An engine that prepares a request itself states when
  (`GenerateContext.preparing`): that time does not count at all.
- A pass-through body: its output may be less than one chunk a step, so only an idle rank counts.
- A rank that makes no step: frontends detect its hang by the step limit.
- An unknown rank: of a request that leaves the choice to an engine with several ranks, only idle
  samples of all ranks count.

Loads may be some tenths of a second old, and prompt tokens of a step may be reported after its
output. Therefore a prompt that is not computed yet needs one more sample per TOKENS_PER_SAMPLE,
and what a rank computes until the second sample after the begin of the quiet time does not count:
it may be older.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.kv.load import Load

SAMPLE_S = 0.1
# Samples between two checks of the requests.
SAMPLES_PER_CHECK = 5
# With a check, and the wait for a probe, a loss is noticed within 10 s.
QUIET_S = 4.0
SAMPLES_MIN = 4
IDLE_SAMPLES_MIN = 10
# A request is part of the load after so many samples with a step.
STEPPED_SAMPLES_MIN = 3
# Time for what comes before the queue of the engine: a constraint, media.
PREPARATION_S = 30.0
KV_FULL = 0.9
TOKENS_PER_SAMPLE = 512
# Prompt tokens of a step of an engine that does not report them.
STEP_TOKENS_ASSUMED = 256
# Multiple of the step limit after which an idle rank explains nothing.
IDLE_LIMITS = 1.5
# Stands for all ranks together.
ANY_RANK = -1
# `tokens_until` before it is known.
_UNKNOWN_TOKENS = 1 << 62


@dataclass(slots=True, eq=False)
class RankActivity:
    """What one rank has done, as counts of samples since start."""

    continued_at: float = -1.0
    """When a request that had output last had more."""

    load: Load | None = None
    reports_prompts: bool = False
    computed_tokens: int = 0
    """Prompt tokens."""

    stepped: int = 0
    promptless: int = 0
    """Samples with a step and no prompt token."""

    continued: int = 0
    idle: int = 0
    full_at: float = -1.0
    """When it last had no memory left."""

    last_started: int = 0
    """Number of the youngest request without a high priority that had output."""

    unstarted: int = 0
    """Open requests without output."""

    # Of the samples since the last check, the fewest:
    waiting_min: int | None = None
    """Waiting requests."""

    queued_min: int | None = None
    """Waiting requests and open rooms."""

    missing_min: int | None = None
    """Requests without output that are in neither."""

    def sample(self, load: Load, sampled_at: float, now: float) -> None:
        """sampled_at: time of the sample before."""
        last, self.load = self.load, load
        queued = load.waiting + load.rooms_open
        self.waiting_min = _fewest(self.waiting_min, load.waiting)
        self.queued_min = _fewest(self.queued_min, queued)
        self.missing_min = _fewest(self.missing_min, self.unstarted - queued)
        if last is None:
            return
        computed = max(0, load.prefill_tokens - last.prefill_tokens)
        self.reports_prompts = self.reports_prompts or computed > 0
        has_stepped = load.engine_step != last.engine_step
        if not self.reports_prompts and has_stepped:
            computed = STEP_TOKENS_ASSUMED
        self.computed_tokens += computed
        self.stepped += has_stepped
        self.promptless += has_stepped and not computed
        self.continued += self.continued_at > sampled_at
        if load.kv_total_blocks and load.kv_used_blocks > KV_FULL * load.kv_total_blocks:
            self.full_at = now
        has_work = load.running or queued or last.running or last.waiting or last.rooms_open
        self.idle += not has_work and not has_stepped


@dataclass(slots=True, eq=False)
class WatchedRequest:
    """One open request."""

    rank: RankActivity
    priority: int
    prompt_tokens: int
    """To compute before the first output."""

    context_tokens: int
    """Tokens of prompt and output, at most."""

    number: int = 0
    """In the order of admission."""

    is_opaque: bool = False
    """Whether only idle samples count: see the module."""

    preparation_s: float = 0.0
    """Time before the engine counts the request, at most."""

    quiet_since: float = 0.0
    output_at: float = -1.0
    """Of the last output; negative before the first."""

    seen_output_at: float = -1.0
    """`output_at` at the last check."""

    needs_proof: bool = False
    """Of a lost one: whether that is certain only after the response to a later probe."""

    is_watched: bool = True
    """False if it is being ended anyway."""

    is_preparing: bool = False
    """Whether the engine prepares it, apart from its queue."""

    # Counts of the rank when the quiet time began.
    stepped: int = 0
    promptless: int = 0
    continued: int = 0
    idle: int = 0
    tokens_until: int = 0
    """`computed_tokens` of the rank from which on no prompt explains the quiet."""

    passed_tokens: int = 0
    stepped_when_computed: int | None = None
    """`stepped` of the rank when this was noticed."""

    @property
    def is_started(self) -> bool:
        """Whether it had output."""
        return self.output_at >= 0


class RequestWatch:
    """The watch of one engine.

    - limit_s: returns the step limit of a rank, in seconds.
    - has_ranks: whether the engine has several.
    - serves_in_order: see EngineConfig.
    """

    def __init__(
        self,
        limit_s: Callable[[int], float],
        *,
        has_ranks: bool = False,
        serves_in_order: bool = False,
    ) -> None:
        self._limit_s = limit_s
        self._serves_in_order = serves_in_order
        self._ranks: dict[int, RankActivity] = {}
        # Requests whose quiet time began since the last sample, and between the last two; with the
        # tokens that their ranks may compute before their output.
        self._restarted: dict[WatchedRequest, int] = {}
        self._unsettled: dict[WatchedRequest, int] = {}
        # Prompt tokens of all requests since start, and of those with a priority.
        self._admitted_tokens = self._urgent_tokens = 0
        self._sampled_at = self._checked_at = -1.0
        self._samples = self._requests = 0
        self._has_ranks = has_ranks

    def rank(self, dp_rank: int | None) -> RankActivity:
        """Returns the activity of a rank. None: the engine chooses the rank."""
        if dp_rank is None:
            dp_rank = ANY_RANK if self._has_ranks else 0
        return self._ranks.setdefault(dp_rank, RankActivity())

    def admit(self, request: WatchedRequest, pending_tokens: int, now: float) -> None:
        """Adds a request. pending_tokens: of all prompts without output, its own too."""
        self._enqueue(request)
        self._admitted_tokens += request.prompt_tokens
        if request.priority:
            self._urgent_tokens += request.prompt_tokens
        self._restart(request, pending_tokens, now)

    def _enqueue(self, request: WatchedRequest) -> None:
        self._requests += 1
        request.number = self._requests
        request.rank.unstarted += 1

    def begin_preparation(self, request: WatchedRequest) -> None:
        """Records that the engine prepares a request without output, apart from its queue."""
        request.is_preparing = True
        request.rank.unstarted -= 1

    def end_preparation(self, request: WatchedRequest, pending_tokens: int, now: float) -> None:
        """Records that a prepared request enters the queue of the engine, unless it has ended.
        pending_tokens: as in `admit`."""
        if request.is_preparing:
            request.is_preparing = False
            self._enqueue(request)
            self._restart(request, pending_tokens, now)

    def start(self, request: WatchedRequest, now: float) -> None:
        """Records the first output of a request."""
        request.output_at = now
        request.rank.unstarted -= 1
        if request.priority <= 0 and request.number > request.rank.last_started:
            request.rank.last_started = request.number

    def end(self, request: WatchedRequest) -> None:
        """Removes a request."""
        request.rank.unstarted -= not (request.is_started or request.is_preparing)
        request.is_preparing = False
        self._restarted.pop(request, None)
        self._unsettled.pop(request, None)

    def sample(self, loads: Sequence[Load], now: float) -> bool:
        """Reads the loads; call it every SAMPLE_S. Returns whether a check is due."""
        for load in loads:
            self.rank(load.dp_rank).sample(load, self._sampled_at, now)
        self._has_ranks = self._has_ranks or len(loads) > 1
        if self._has_ranks:
            self.rank(ANY_RANK).sample(_sum_of(loads), self._sampled_at, now)
        for request, tokens in self._unsettled.items():
            request.tokens_until = request.rank.computed_tokens + tokens
        self._unsettled, self._restarted = self._restarted, {}
        self._sampled_at = now
        self._samples += 1
        return self._samples % SAMPLES_PER_CHECK == 0

    def check(
        self, requests: Iterable[WatchedRequest], pending_tokens: int, now: float
    ) -> list[WatchedRequest]:
        """Returns the lost requests. requests: all open ones. pending_tokens: as in `admit`."""
        quiet: dict[RankActivity, list[WatchedRequest]] = {}
        for request in requests:
            if request.output_at != request.seen_output_at:
                request.seen_output_at = request.output_at
                self._restart(request, 0, request.output_at)
            elif request.is_preparing or not request.is_watched:
                continue
            elif request.quiet_since <= self._checked_at:
                quiet.setdefault(request.rank, []).append(request)
        lost: list[WatchedRequest] = []
        for rank, candidates in quiet.items():
            lost += self._find_lost(rank, candidates, pending_tokens, now)
        for rank in self._ranks.values():
            rank.waiting_min = rank.queued_min = rank.missing_min = None
        self._checked_at = now
        return lost

    def _find_lost(
        self, rank: RankActivity, quiet: list[WatchedRequest], pending_tokens: int, now: float
    ) -> list[WatchedRequest]:
        """Returns the lost ones of the quiet requests of a rank."""
        started = [request for request in quiet if request.is_started]
        unstarted = [request for request in quiet if not request.is_started]
        lost_max = (rank.missing_min or 0) + len(started)
        lost: list[WatchedRequest] = []
        for requests, queued_min in ((started, rank.waiting_min), (unstarted, rank.queued_min)):
            overdue = [request for request in requests if self._is_overdue(request, now)]
            if not queued_min:
                lost += overdue
                continue
            passed = [request for request in overdue if lost_max > 0 and self._is_passed(request)]
            passed.sort(key=lambda request: request.quiet_since)
            lost += passed[: max(0, lost_max)]
            for request in requests if lost_max <= 0 else overdue:
                if request not in lost:
                    own_tokens = request.context_tokens if request.is_started else 0
                    self._restart(request, pending_tokens + own_tokens, now)
        return lost

    def _restart(self, request: WatchedRequest, tokens: int, now: float) -> None:
        """Begins the quiet time of a request. tokens: that the rank may compute before its next
        output."""
        rank = request.rank
        request.quiet_since = now
        request.stepped, request.promptless = rank.stepped, rank.promptless
        request.continued, request.idle = rank.continued, rank.idle
        self._unsettled.pop(request, None)
        self._restarted.pop(request, None)
        request.tokens_until = rank.computed_tokens
        if tokens:
            request.tokens_until = _UNKNOWN_TOKENS
            self._restarted[request] = tokens
        request.passed_tokens = self._passed_tokens(request)
        request.stepped_when_computed = None

    def _passed_tokens(self, request: WatchedRequest) -> int:
        """Returns a count that grows by the prompts that may pass the request in the queue."""
        return self._admitted_tokens if request.priority < 0 else self._urgent_tokens

    def _tokens_left(self, request: WatchedRequest) -> int:
        """Returns the prompt tokens that the rank may compute before the request has output. If
        none are left, its prompt has been computed, or the request is lost."""
        passed = self._passed_tokens(request) - request.passed_tokens
        return max(0, request.tokens_until + passed - request.rank.computed_tokens)

    def has_no_prompt_left(self, request: WatchedRequest) -> bool:
        """Returns whether the prompt is computed, or the request is lost."""
        if request.is_preparing:
            return False
        is_computed = request.rank.reports_prompts and not self._tokens_left(request)
        return is_computed or self._is_unreported(request)

    def _is_unreported(self, request: WatchedRequest) -> bool:
        """Returns whether the rank is idle although it has made steps since the request came: it
        would have reported it."""
        rank = request.rank
        has_stepped = rank.stepped - request.stepped >= STEPPED_SAMPLES_MIN
        return has_stepped and rank.idle - request.idle >= IDLE_SAMPLES_MIN

    def _is_overdue(self, request: WatchedRequest, now: float) -> bool:
        rank, left = request.rank, self._tokens_left(request)
        if not left and request.stepped_when_computed is None:
            request.stepped_when_computed = rank.stepped
        quiet_s = now - request.quiet_since
        if quiet_s < QUIET_S + (0.0 if request.is_started else request.preparation_s):
            return False
        request.needs_proof = False
        if rank.idle - request.idle >= IDLE_SAMPLES_MIN:
            is_late = quiet_s >= self._idle_limit_s(rank)
            request.needs_proof = not (is_late or self._is_unreported(request))
            return True
        if request.is_opaque or rank.load is None or rank.load.dp_rank == ANY_RANK:
            return False
        if request.is_started:
            has_memory = now - rank.full_at >= QUIET_S
            return not left and has_memory and rank.continued - request.continued >= SAMPLES_MIN
        if request.stepped_when_computed is None:
            needed = SAMPLES_MIN + left // TOKENS_PER_SAMPLE
            return rank.promptless - request.promptless >= needed
        return rank.stepped - request.stepped_when_computed >= SAMPLES_MIN

    def _is_passed(self, request: WatchedRequest) -> bool:
        """Returns whether a request does not wait in the queue: it had output, or a later one
        without a higher priority had output before it. A request that needs a preparation may enter
        the queue late."""
        if request.is_started:
            return True
        is_ahead = request.number < request.rank.last_started and request.priority >= 0
        return self._serves_in_order and is_ahead and not request.preparation_s

    def _idle_limit_s(self, rank: RankActivity) -> float:
        return IDLE_LIMITS * self._limit_s(0 if rank.load is None else rank.load.dp_rank)


def _fewest(fewest: int | None, count: int) -> int:
    return count if fewest is None or count < fewest else fewest


def _sum_of(loads: Sequence[Load]) -> Load:
    """Returns the queue of all ranks as one."""
    return Load(
        dp_rank=ANY_RANK,
        engine_step=sum(load.engine_step for load in loads),
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        rooms_open=sum(load.rooms_open for load in loads),
    )
