"""Requests of SGLang 0.5.23 that continue output of another worker.

The last tokens of such a prompt are output: a grammar starts after them, and penalties count them.
SGLang has no such requests, so this module changes its scheduler, inside of the scheduler's own
process. The number of the tokens travels in the request's `custom_params`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

GRAMMAR_PREFIX: Final = "kvmesh_grammar_prefix"
PENALTY_PREFIX: Final = "kvmesh_penalty_prefix"


# Any, here and below: SGLang's objects and arguments, which have no types for this project.
def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Runs SGLang's scheduler process with the changes of this module."""
    from sglang.srt.managers.scheduler import run_scheduler_process  # type: ignore[import-not-found] # noqa: TID251

    change_grammars()
    change_penalties()
    return run_scheduler_process(*args, **kwargs)


def change_grammars() -> None:
    """Advances the grammar of a request over the tokens so far, as soon as it is compiled."""
    from sglang.srt.constrained.grammar_manager import GrammarManager  # type: ignore[import-not-found] # noqa: TID251

    process, take_ready = (
        GrammarManager.process_req_with_grammar,
        GrammarManager.get_ready_grammar_requests,
    )

    @wraps(process)
    def process_req_with_grammar(self: Any, req: Any) -> bool:
        is_queued: bool = process(self, req)
        if not is_queued:
            advance_grammar(req)
        return is_queued

    @wraps(take_ready)
    def get_ready_grammar_requests(self: Any) -> Sequence[Any]:
        ready: Sequence[Any] = take_ready(self)
        for req in ready:
            advance_grammar(req)
        return ready

    GrammarManager.process_req_with_grammar = process_req_with_grammar
    GrammarManager.get_ready_grammar_requests = get_ready_grammar_requests


def advance_grammar(req: Any) -> None:
    """Advances the grammar of a request over its prefix; ends it with an error if the grammar does
    not allow the prefix."""
    tokens = prefix_of(req, GRAMMAR_PREFIX)
    if not tokens or req.grammar is None or req.finished():
        return
    try:
        for token in tokens:
            req.grammar.accept_token(token)
    except ValueError:
        req.set_finish_with_abort("the constraint does not allow the tokens so far")


def change_penalties() -> None:
    """Counts the tokens so far for penalties. These are applied in a fixed order, which in SGLang
    differs between processes: additive ones first."""
    from sglang.srt.sampling import penaltylib  # type: ignore[import-not-found] # noqa: TID251

    begin = penaltylib.BatchedPenalizerOrchestrator.__init__

    @wraps(begin)
    def begin_in_order(self: Any, vocab_size: int, batch: Any, penalizers: Any) -> None:
        in_order = sorted(penalizers, key=lambda one: (one.is_multiplicative, one.__name__))
        begin(self, vocab_size, batch, in_order)

    penaltylib.BatchedPenalizerOrchestrator.__init__ = begin_in_order
    for penalizer, count in (
        (penaltylib.BatchedFrequencyPenalizer, _count_frequency),
        (penaltylib.BatchedPresencePenalizer, _count_presence),
        (penaltylib.BatchedRepetitionPenalizer, _count_repetition),
    ):
        penalizer._prepare = _counting(penalizer._prepare, count)


def prefix_of(req: Any, name: str) -> list[int]:
    """Returns the tokens of the prompt that are output. name: for what they are."""
    parameters = req.sampling_params.custom_params
    count = parameters.get(name, 0) if isinstance(parameters, dict) else 0
    return list(req.origin_input_ids[len(req.origin_input_ids) - count :]) if count else []


def _counting(
    prepare: Callable[[Any], None], count: Callable[[Any, int, Any], None]
) -> Callable[[Any], None]:
    """Returns `_prepare` of a penalizer, which then counts the prefix of each request."""

    @wraps(prepare)
    def prepare_and_count(self: Any) -> None:
        import torch  # type: ignore[import-not-found]

        prepare(self)
        for row, req in enumerate(self.orchestrator.reqs()):
            if tokens := prefix_of(req, PENALTY_PREFIX):
                count(self, row, torch.tensor(tokens, device=self.orchestrator.device))

    return prepare_and_count


def _count_frequency(penalizer: Any, row: int, tokens: Any) -> None:
    # One addition for each token, as during the response, for the same rounding.
    additions = penalizer.frequency_penalties[row].expand(len(tokens))
    penalizer.cumulated_frequency_penalties[row].scatter_add_(0, tokens, additions)


def _count_presence(penalizer: Any, row: int, tokens: Any) -> None:
    penalizer.cumulated_presence_penalties[row, tokens] = penalizer.presence_penalties[row, 0]


def _count_repetition(penalizer: Any, row: int, tokens: Any) -> None:
    penalizer.cumulated_repetition_penalties[row, tokens] = penalizer.repetition_penalties[row, 0]
