"""Tokenisation, stop strings, chat templates and delivery of text. Imports without torch."""
