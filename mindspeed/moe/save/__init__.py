"""What the backward of experts keeps, and how it gets back what it does not keep."""
