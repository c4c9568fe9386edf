"""Simulation of deployments: the real scheduler and KV cache under a modelled clock."""
