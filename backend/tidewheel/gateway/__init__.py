"""OpenAI's HTTP API in front of one Tritonserver or several that serve our models."""
