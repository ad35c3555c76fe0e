"""Text generation with trained models."""
