"""What a lost state costs, and the ladder of models below the GRU."""
