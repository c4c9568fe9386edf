"""Routing of requests to replicas, and the number of replicas."""
