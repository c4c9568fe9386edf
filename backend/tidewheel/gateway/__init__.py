"""OpenAI's HTTP API in front of one Tritonserver or several."""

MAX_BODY_MB = 4  # a prompt of 262,144 tokens, each of 16 bytes
