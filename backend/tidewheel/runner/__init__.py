"""Everything that happens on the device: model, cache, inputs and sampling of one engine."""
