"""Which variables the services of `meshctl up` receive (pure).

A service receives the variables that it, its libraries or its engine read. The environment of the
caller may also have secrets of other programs, which a service could log or pass on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from common.runtime.config import PREFIX

# Names, or patterns with `*`.
_EVERY_SERVICE: Final = (
    f"{PREFIX}*",
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("XDG_*", "PYTHON*", "VIRTUAL_ENV", "LD_*", "MALLOC_*", "GRPC_*", "OTEL_*", "SSL_CERT_*"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("CONSUL_HTTP_TOKEN", "OMP_*", "RAYON_*", "RUST_*", "TOKENIZERS_*"),
)
_WORKER: Final = (
    *("SGLANG_*", "SGL_*", "FLASHINFER_*", "TRITON_*", "TORCH*", "PYTORCH_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "NVSHMEM_*", "GLOO_*", "UCX_*", "NIXL_*", "MC_*"),
    *("HIP_*", "ROCR_*", "ROCM_*", "HSA_*", "ZE_*", "MKL_*", "KMP_*", "OPENBLAS_*", "CC", "CXX"),
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*"),
)


def service_environment(
    environ: Mapping[str, str], module: str, passed: Iterable[str] = ()
) -> dict[str, str]:
    """Returns the environment of a service.

    - environ: that of the caller.
    - module: the Python module of the service, such as `worker_svc`.
    - passed: more names, or patterns with `*`.
    """
    patterns = (*_EVERY_SERVICE, *(_WORKER if module == "worker_svc" else ()), *passed)
    return _matching(environ, patterns)


def passed_variables(environ: Mapping[str, str], passed: Iterable[str] = ()) -> dict[str, str]:
    """Returns the variables that services on other hosts receive of the caller: settings, and those
    that are named. Paths and libraries are those of their hosts.

    passed: as for `service_environment`.
    """
    return _matching(environ, (f"{PREFIX}*", *passed))


def _matching(environ: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    patterns = tuple(patterns)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
