"""How tokens reach their experts: the stages of a dispatcher, each a function of a chunk."""
