"""Pinned memory, which needs an accelerator; SGLang's LoRA adapters request it unconditionally."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

# What allocates pinned memory.
ADAPTER_FUNCTIONS = (
    "sglang.srt.lora.lora.LoRAAdapter.pin_weights_in_cpu",
    "sglang.srt.lora.lora_manager.LoRAManager.init_state",
    "sglang.srt.lora.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
)


class _Unpinned(TorchFunctionMode):
    """Allocates plain memory instead."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.Tensor.pin_memory:
            return args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **options)


def without_pinning(original, *args, **kwargs):  # type: ignore[no-untyped-def]
    """Calls a function that would pin memory."""
    with _Unpinned():
        return original(*args, **kwargs)
