"""Two halves of a micro-batch in turn: one's collectives hide behind the other's products."""
