"""Between Triton's Python backend and the front end: tensors, responders, settings, metrics."""
