"""Update rules, and how and where their states are stored."""
