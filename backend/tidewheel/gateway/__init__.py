"""Gateway: OpenAI's HTTP API in front of one or several Triton servers."""

MAX_BODY_MB = 4  # a prompt of 262,144 tokens, each of 16 bytes
ADDRESS_FORM = "[dns:]HOST:PORT[,metrics=PORT][,health=PORT][,http=PORT][,cost=N]"
