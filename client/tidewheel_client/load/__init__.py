"""Load from many users, with locust; needs the extra `load`."""
