"""Admission, order of service, token budget and preemption. No torch, no clock."""
