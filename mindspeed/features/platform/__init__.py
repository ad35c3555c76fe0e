"""Device, operators, precision and observation."""
