"""What SGLang itself makes of prompts with images, read by its own processor from text and files.

usage: python -m tests.sglang.own_images MODEL OUT MAX_TOKENS PROMPT IMAGE…

Writes one JSON object for each image to OUT: text and prompt_tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from worker_svc.engines.sglang.server_args import server_arguments


def main(model: str, out: str, max_tokens: str, prompt: str, *images: str) -> None:
    from sglang.srt.entrypoints.engine import Engine  # type: ignore[import-not-found]

    arguments = server_arguments(
        "aggregated",
        {"enable_multimodal": True, "max_total_tokens": 4096, "disable_radix_cache": True},
        is_cpu=True,
        block_size=16,
        adapter_arguments={"model_path": model},
    )
    engine = Engine(**arguments)
    sampling = {"max_new_tokens": int(max_tokens), "temperature": 0, "ignore_eos": True}

    async def answers() -> list[dict[str, Any]]:
        found = []
        for image in images:
            one = await engine.async_generate(
                prompt=prompt, image_data=[image], sampling_params=sampling
            )
            tokens = one["meta_info"]["prompt_tokens"]
            found.append({"text": one["text"], "prompt_tokens": tokens})
        return found

    found = engine.loop.run_until_complete(answers())
    Path(out).write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
