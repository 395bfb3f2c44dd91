"""Building large models: layers made in `configure_model` are recorded, and each rank makes only what it holds."""
