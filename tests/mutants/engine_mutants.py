"""Defects of the engine contract (S4), and the rows whose tests must find them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_APP = "worker_svc/app.py"
_CONTRACT = "worker_svc/engines/contract.py"
_RUNNER = "worker_svc/serving/runner.py"
_SERVICE = "worker_svc/serving/service.py"

ENGINE_MUTANTS = (
    mutant("S4-07", _RUNNER, "active_request.ctx.notify_first_token()", "pass"),
    mutant(
        "S4-06",
        _RUNNER,
        "asyncio.Event() if is_decode else None",
        "asyncio.Event()",
    ),
    mutant("S4-33", _RUNNER, "if terminal.finish_reason is FinishReason.ERROR:", "if False:"),
    mutant(
        "S4-19",
        _CONTRACT,
        "if self.bootstrap_host is None or self.bootstrap_port is None:",
        "if self.bootstrap_host is None:",
    ),
    mutant(
        "S4-12 S4-18",
        _APP,
        "block_size=engine.kv_cache_block_size,",
        "block_size=engine.kv_cache_block_size or 16,",
    ),
    mutant(
        "S4-27 S4-31 S4-32",
        _RUNNER,
        "    if isinstance(error, MeshError):\n        return error\n",
        "    if isinstance(error, MeshError):\n        return InternalError(error.message)\n",
    ),
    mutant(
        "S4-29 S4-37",
        _RUNNER,
        "abort_timeout.reschedule(asyncio.get_running_loop().time() + ABORT_GRACE_S)",
        "pass",
    ),
    mutant(
        "S4-34",
        "frontend_svc/request/machine.py",
        "self._prompt_details = _prompt_details(terminal)",
        "self._prompt_details = None",
    ),
    mutant(
        "S4-39",
        "worker_svc/serving/attach_server.py",
        "                self._runner.discard(key)\n",
        "                pass\n",
    ),
    mutant("S4-10", _CONTRACT, "self.served_model_name or self.model", "self.model"),
    mutant(
        "S4-35",
        _CONTRACT,
        'raise self._broken("chunk after the terminal chunk")',
        "return",
    ),
    mutant(
        "S4-53 S4-56 S4-57",
        "common/request/preprocessed/response.py",
        "min(prompt + completion, top)",
        "prompt + completion",
    ),
    mutant("S4-21 S4-40 S4-42", _APP, "await self.engine.drain()", "pass"),
    mutant("S4-47 S4-43", _APP, "await self.engine.cleanup()", "pass"),
    # The context.
    mutant(
        "S4-01 S4-02",
        _RUNNER,
        "        ctx = GenerateContext(\n            leg_request.request_id,\n",
        '        ctx = GenerateContext(\n            "",\n',
    ),
    mutant(
        "S4-03 S4-36",
        _RUNNER,
        "        self.counters[outcome] += 1\n",
        '        self.counters[outcome] += 1\n        active_request.ctx.stop_generating("")\n',
    ),
    mutant("S4-04 S4-05", _CONTRACT, "self.first_token = first_token", "self.first_token = None"),
    mutant("S4-08", _CONTRACT, "        self._killed.set()\n", "        pass\n"),
    # What a worker advertises.
    mutant("S4-09", _SERVICE, "model=instance.model,", 'model="",'),
    mutant("S4-11", _SERVICE, "context_length=config.context_length", "context_length=None"),
    mutant("S4-13", _APP, "total_kv_blocks=engine.total_kv_blocks", "total_kv_blocks=None"),
    mutant("S4-14", _APP, "max_num_seqs=engine.max_num_seqs", "max_num_seqs=None"),
    mutant(
        "S4-15",
        _APP,
        "max_num_batched_tokens=engine.max_num_batched_tokens",
        "max_num_batched_tokens=None",
    ),
    mutant(
        "S4-16 S4-17",
        _APP,
        "endpoint = engine.disaggregated_endpoint or (None, None)",
        "endpoint = (None, None)",
    ),
    mutant(
        "S4-20",
        _CONTRACT,
        "    total_kv_blocks: int | None = None\n",
        "    total_kv_blocks: int | None = 1\n",
    ),
    # The life cycle.
    mutant(
        "S4-23 S4-25",
        _APP,
        "await self.engine.start(self.instance_id)",
        "await self.engine.start(1)",
    ),
    mutant("S4-24", _RUNNER, "self.is_draining = False", "self.is_draining = True"),
    mutant("S4-26", _APP, 'log.info("engine_started"', 'log.info("started"'),
    mutant(
        "S4-41",
        _APP,
        "        except Exception:  # S4-41: the shutdown continues.\n",
        "        except NotImplementedError:\n",
    ),
    # The stream.
    mutant(
        "S4-22 S4-28",
        _RUNNER,
        "if len(self._active_requests) >= self._max_requests:",
        "if self._active_requests:",
    ),
    mutant(
        "S4-30 S4-48 S4-49 S4-54",
        _SERVICE,
        "    message.finish_reason = finish_reason_to_proto(terminal.finish_reason)\n",
        "    pass\n",
    ),
    mutant(
        "S4-38",
        _RUNNER,
        "            if failure is None:\n",
        "            if failure is None:\n"
        "                await self.engine.abort(active_request.ctx)\n",
    ),
    # Helpers.
    mutant(
        "S4-50 S4-52 S4-55",
        _CONTRACT,
        "return replace(self, token_ids=tuple(token_ids))",
        "return replace(self, token_ids=(*self.token_ids, *token_ids))",
    ),
    mutant(
        "S4-51",
        _CONTRACT,
        "return replace(self, completion_usage=completion_usage)",
        "return self",
    ),
    mutant("S4-58 S4-59 S4-60 S4-61 S4-62", _CONTRACT, "    OutputOptions as OutputOptions,\n", ""),
)
