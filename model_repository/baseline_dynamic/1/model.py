"""transformers `generate` behind Triton's own batcher: config.pbtxt says how it forms batches."""

from tidewheel.adapter.baseline import TritonPythonModel

__all__ = ["TritonPythonModel"]
