"""Models: a checkpoint folder in, a `CausalLM` out."""
