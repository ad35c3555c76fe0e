"""How unevenly tokens go to experts: watched in a run, recorded, and what to do about it."""
