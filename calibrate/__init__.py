"""Run the model over sample data, one layer at a time, and decide every scale and code."""
