"""EAMPQ as pure functions on tensors. Imports nothing of ours, reads no files, prints nothing."""
