"""Perplexity, divergence, drift over long dialogues, number errors, and the report."""
