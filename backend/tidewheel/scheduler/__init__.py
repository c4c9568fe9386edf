"""Admission, order of service, token budget and preemption, without torch and without a clock."""
