"""glm5-tiny: the small trained model that ships with the package, and its corpus."""
