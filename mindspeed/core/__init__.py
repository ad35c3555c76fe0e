"""Import paths of the original library; what they name is implemented elsewhere."""
