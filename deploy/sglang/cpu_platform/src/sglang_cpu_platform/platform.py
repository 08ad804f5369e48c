"""The platform class, which SGLang imports at run time."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin  # noqa: TID251
from sglang.srt.platforms.device_mixin import PlatformEnum  # noqa: TID251
from sglang.srt.platforms.interface import SRTPlatform  # noqa: TID251


class CpuNativePlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU that dispatches to torch-native operators."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        """Returns an attention backend without own kernels."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Returns the variant of SGLang's operators."""
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Returns no compiler: it would block all requests for ten seconds at the first repetition
        penalty, or end the scheduler on a machine without a C++ compiler."""
        return "eager"

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Returns False: pinned memory needs an accelerator."""
        return False
