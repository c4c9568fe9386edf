"""Locust file for a server of OpenAI's API (docs/clients.md)."""

from tidewheel_client.load import locustfile  # its options
from tidewheel_client.load.users import OpenAiUser

__all__ = ["OpenAiUser", "locustfile"]
