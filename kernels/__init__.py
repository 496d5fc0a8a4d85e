"""Computing with INT4 codes: reference, CPU and Triton paths, and the one function that chooses."""
