"""Configs of the Tangram experiments: profiles, budgets, accuracy, kernels and serving."""
