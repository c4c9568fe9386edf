"""Load from many users, run by locust with `locustfile.py`. Needs the extra `load`."""
