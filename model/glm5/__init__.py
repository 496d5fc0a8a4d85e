"""The reference GLM-5 architecture (model type glm5_ref)."""
