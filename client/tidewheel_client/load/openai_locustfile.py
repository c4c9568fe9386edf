"""Load on the gateway, or another server of OpenAI's API, for locust:

locust -f client/tidewheel_client/load/openai_locustfile.py --headless -u 200 -r 50 -t 2m --host http://127.0.0.1:8080
"""

from __future__ import annotations

from tidewheel_client.load import locustfile  # its options
from tidewheel_client.load.users import OpenAiUser

__all__ = ["OpenAiUser", "locustfile"]
