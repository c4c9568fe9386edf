"""Device side of an engine: model, cache, inputs and sampling."""
