"""Text in, text out: tokenisation, stop strings, chat templates and delivery. Imports without torch."""
