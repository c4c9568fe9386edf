"""Load tests with many users, by locust; needs the extra `load`."""
