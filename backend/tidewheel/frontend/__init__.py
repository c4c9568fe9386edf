"""Tokenisation, stop strings, chat templates and delivery of text, without torch."""
