"""transformers `generate` behind Triton's own batcher: config.pbtxt says how it forms batches."""

import triton_python_backend_utils

from tidewheel.bench.transformers_baseline import TransformersBaseline


class TritonPythonModel(TransformersBaseline):
    triton = triton_python_backend_utils
