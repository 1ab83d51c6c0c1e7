"""Operations in which the ranks that share a model wait for each other."""
