"""Two halves of a micro-batch in turn, so that one's collectives hide behind the other's products."""
