"""Load from many users at once, by locust: `locustfile.py` is what locust is given. Needs the extra `load`."""
