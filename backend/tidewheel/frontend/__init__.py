"""Text in, text out: tokenise, detokenise, stop strings, chat template, coalescing. Imports without torch."""
