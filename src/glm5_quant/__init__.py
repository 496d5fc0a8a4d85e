"""glm5-quant: EAMPQ INT4 quantization of Mixture-of-Experts language models, and proof of how good the result is."""

__version__ = "0.1.0"
