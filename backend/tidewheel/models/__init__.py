"""Models as the runner sees them: a checkpoint folder in, a `CausalLM` out."""
