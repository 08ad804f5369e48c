"""SGLang on a plain CPU: torch's own operators instead of `sgl_kernel`.

SGLang finds this package by its entry points and asks it at start; where there is an accelerator it
declines. It fits SGLang 0.5.23 and no other version: two of the places it hooks are internal.
"""

from __future__ import annotations

from functools import cache

import torch


def activate() -> str | None:
    """The platform's class by name; None where there is an accelerator."""
    if torch.cuda.is_available():
        return None
    declare_torchvision_ops()
    return "sglang_cpu_platform.platform.CpuNativePlatform"


@cache  # the declarations last as long as the library object
def declare_torchvision_ops() -> torch.library.Library | None:
    """Lets a CUDA build of torchvision be imported beside a CPU build of torch.

    Its C++ library does not load then, and importing its Python part fails merely because that
    registers fake kernels for two operators which nobody declared.
    """
    if torch.version.cuda is not None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def register_hooks() -> None:
    """Mends two places which assume an accelerator although the device is a CPU."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: TID251

    from sglang_cpu_platform.timing import CpuInterval

    HookRegistry.register(
        "sglang.srt.disaggregation.utils.get_kv_class", _with_plain_indices, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.utils.device_timer._TimingInterval", CpuInterval, HookType.REPLACE
    )


def _with_plain_indices(original, transfer_backend, class_type):  # type: ignore[no-untyped-def]
    """Prefill copies page indices to pinned memory and records a CUDA event when the sender's class
    says so; on a CPU it takes the plain branch."""
    kind = original(transfer_backend, class_type)
    if getattr(kind, "supports_host_tensor_indices", False):
        kind.supports_host_tensor_indices = False
    return kind
