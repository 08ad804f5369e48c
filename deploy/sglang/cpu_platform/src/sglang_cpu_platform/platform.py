"""The platform's class; imported by SGLang, once it runs."""

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
        """Attention without kernels of its own."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Which variant of SGLang's operators to take."""
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """No compiler: the first repetition penalty would stop all requests for ten seconds, or end
        the scheduler where there is no C++ compiler."""
        return "eager"

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Pinned memory needs an accelerator."""
        return False
