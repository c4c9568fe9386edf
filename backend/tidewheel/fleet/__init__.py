"""Routing of requests to replicas, and scaling."""
