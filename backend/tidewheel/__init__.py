"""Tidewheel serves large language models from NVIDIA Triton Inference Server.

Names load on first use, so that importing the package never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidewheel.version import __version__ as __version__

if TYPE_CHECKING:
    from tidewheel.grammar import Grammar as Grammar
    from tidewheel.llm import LLM as LLM
    from tidewheel.request_options import RequestOptions as RequestOptions
    from tidewheel.sampling import SamplingParams as SamplingParams

_EXPORTS = {
    "Grammar": "tidewheel.grammar",
    "LLM": "tidewheel.llm",
    "RequestOptions": "tidewheel.request_options",
    "SamplingParams": "tidewheel.sampling",
}

__all__ = ["LLM", "Grammar", "RequestOptions", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
