"""SGLang on a plain CPU: torch's own operators instead of `sgl_kernel`.

SGLang loads this package by its entry points at start; with an accelerator the package is inactive.
It fits SGLang 0.5.23 only: its hooks replace internal functions.
"""

from __future__ import annotations

from functools import cache

import torch


def activate() -> str | None:
    """Returns the name of the platform class; None with an accelerator."""
    if torch.cuda.is_available():
        return None
    declare_torchvision_ops()
    return "sglang_cpu_platform.platform.CpuNativePlatform"


@cache  # the declarations last as long as the library object
def declare_torchvision_ops() -> torch.library.Library | None:
    """Makes a CUDA build of torchvision importable with a CPU build of torch.

    Its C++ library does not load then, and the import of its Python part fails only because that
    registers fake kernels for two undeclared operators.
    """
    if torch.version.cuda is not None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def register_hooks() -> None:
    """Replaces functions that assume an accelerator even if the device is a CPU."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: TID251

    from sglang_cpu_platform.pinning import ADAPTER_FUNCTIONS, without_pinning
    from sglang_cpu_platform.timing import CpuInterval

    HookRegistry.register(
        "sglang.srt.disaggregation.utils.get_kv_class", _with_plain_indices, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.utils.device_timer._TimingInterval", CpuInterval, HookType.REPLACE
    )
    for name in ADAPTER_FUNCTIONS:
        HookRegistry.register(name, without_pinning, HookType.AROUND)


def _with_plain_indices(original, transfer_backend, class_type):  # type: ignore[no-untyped-def]
    """Disables the sender's flag for page indices in pinned memory with a CUDA event."""
    kind = original(transfer_backend, class_type)
    if getattr(kind, "supports_host_tensor_indices", False):
        kind.supports_host_tensor_indices = False
    return kind
